"""Entering pages into the prefix index: full, durable, and worth keeping."""

from __future__ import annotations

from outrider.kv.layout import KVLayout
from outrider.kv.ledger import SequenceKV
from outrider.kv.observer import KVObserver
from outrider.kv.pool import PagePool
from outrider.kv.prefix import TOKEN_BYTES


class Publisher:
    def __init__(self, layout: KVLayout, pool: PagePool, observer: KVObserver | None) -> None:
        self._layout = layout
        self._pool = pool
        self._observer = observer

    def publish(self, sequence: SequenceKV, group: int, first: int, stop: int) -> None:
        """Publish pages [first, stop) of one group; all their slots are durable, and their reach is known.

        tokens   | page first ... page stop-1 | reach |
        key      = base at the page's end, then the reach tokens after the page
        content  = the page's tokens and the reach: what a hit inside the page is compared with
        """
        layout, chain = self._layout, sequence.chain
        size, reach = layout.groups[group].page_tokens, layout.reach[group]
        pages = sequence.groups[group].pages
        known, in_index = self._pool.indexes[group].pages, self._pool.arena(group).published
        chain.extend(sequence.tokens, stop * size)
        step = size // layout.grain
        bases = chain.bases[first * step : stop * step + 1 : step]
        data = sequence.tokens[first * size : stop * size + reach].tobytes()
        stride, width = size * TOKEN_BYTES, (size + reach) * TOKEN_BYTES
        skims, media, offset = not layout.retains_all[group], chain.media, 0
        entries = []
        for number in range(first, stop):
            content = data[offset : offset + width]
            key = bases[number - first + 1]
            if reach:
                key += chain.successors(sequence.tokens, (number + 1) * size, reach) if media else content[stride:]
            offset += stride
            page = pages[number]
            if key in known or in_index[page] or (skims and not layout.retains(group, number)):
                if self._observer and key in known:
                    self._observer.already_published(sequence, group, number, known[key])
                continue
            if media and chain.has_media(number * size, (number + 1) * size + reach):
                content = b""
            entries.append((content, page, key, bases[number - first]))
            if self._observer:
                self._observer.published(sequence, group, number, page, key)
        self._pool.publish(group, entries)
        if self._observer:
            self._observer.offered(sequence, group, first, stop)
