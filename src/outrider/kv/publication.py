"""Entering pages into the prefix index: full, durable, and worth keeping."""

from __future__ import annotations

from outrider.kv.layout import KVLayout
from outrider.kv.ledger import SequenceKV
from outrider.kv.observer import KVObserver
from outrider.kv.pool import PagePool
from outrider.kv.prefix import RUN_PAGES, TOKEN_BYTES, PageEntry


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
        chain.extend(sequence.tokens, stop * size)
        step = size // layout.grain
        if stop - first == 1 and not self._observer and not chain.media:
            self._publish_one(sequence, group, first, chain.bases[first * step], chain.bases[stop * step])
            return
        bases = chain.bases[first * step : stop * step + 1 : step]
        data = sequence.tokens[first * size : stop * size + reach].tobytes()
        stride, width = size * TOKEN_BYTES, (size + reach) * TOKEN_BYTES
        known, in_index = self._pool.indexes[group].pages, self._pool.arena(group).published
        pages, observer, media = sequence.groups[group].pages, self._observer, chain.media
        skims, offset = not layout.retains_all[group], 0
        entries = []
        for number in range(first, stop):
            content = data[offset : offset + width]
            offset += stride
            key = bases[number - first + 1]
            if reach:
                key += chain.successors(sequence.tokens, (number + 1) * size, reach) if media else content[stride:]
            page = pages[number]
            if key in known or in_index[page] or (skims and not layout.retains(group, number)):
                if observer and key in known:
                    observer.already_published(sequence, group, number, known[key])
                continue
            if media and chain.has_media(number * size, (number + 1) * size + reach):
                content = b""
            entries.append((content, page, key, bases[number - first]))
            if observer:
                observer.published(sequence, group, number, page, key)
        self._pool.publish(group, entries)
        if len(entries) == stop - first:
            self._remember_runs(group, first, entries)
        if observer:
            observer.offered(sequence, group, first, stop)

    def _publish_one(self, sequence: SequenceKV, group: int, number: int, parent: bytes, base: bytes) -> None:
        """The common case of decoding: one page, and nobody watching."""
        layout, pool = self._layout, self._pool
        size, reach = layout.groups[group].page_tokens, layout.reach[group]
        content = sequence.tokens[number * size : (number + 1) * size + reach].tobytes()
        key = base + content[size * TOKEN_BYTES :] if reach else base
        page = sequence.groups[group].pages[number]
        if key in pool.indexes[group].pages or pool.arena(group).published[page]:
            return
        if layout.retains_all[group] or layout.retains(group, number):
            pool.publish(group, [(content, page, key, parent)])

    def _remember_runs(self, group: int, first: int, entries: list[PageEntry]) -> None:
        """Whole runs among pages that were published together are found with one look-up."""
        for start in range(-first % RUN_PAGES, len(entries) - RUN_PAGES + 1, RUN_PAGES):
            run = entries[start : start + RUN_PAGES]
            self._pool.indexes[group].remember_run(run[-1][2], [page for _, page, _, _ in run])
