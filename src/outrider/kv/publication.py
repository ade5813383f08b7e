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
        contents = [data[offset : offset + width] for offset in range(0, (stop - first) * stride, stride)]
        keys = bases[1:]
        if chain.media:
            keys = [
                key + chain.successors(sequence.tokens, number * size, reach)
                for number, key in enumerate(keys, start=first + 1)
            ]
            contents = [
                b"" if chain.has_media(number * size, (number + 1) * size + reach) else content
                for number, content in enumerate(contents, start=first)
            ]
        elif reach:
            keys = [key + content[stride:] for key, content in zip(keys, contents, strict=True)]
        entries = list(zip(contents, sequence.groups[group].pages[first:stop], keys, bases, strict=False))
        worth = self._worth_publishing(group, first, entries)
        if self._observer:
            self._report(sequence, group, first, entries, worth)
        self._pool.publish(group, worth)
        if len(worth) == len(entries):
            self._remember_runs(group, first, entries)
        if self._observer:
            self._observer.offered(sequence, group, first, stop)

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
            pool.publish_one(group, content, page, key, parent)

    def _remember_runs(self, group: int, first: int, entries: list[PageEntry]) -> None:
        """Whole runs among pages that were published together are found with one look-up."""
        for start in range(-first % RUN_PAGES, len(entries) - RUN_PAGES + 1, RUN_PAGES):
            run = entries[start : start + RUN_PAGES]
            self._pool.indexes[group].remember_run(run[-1][2], [page for _, page, _, _ in run])

    def _worth_publishing(self, group: int, first: int, entries: list[PageEntry]) -> list[PageEntry]:
        """Without pages that the index holds already, and those that no hit can need."""
        layout, known = self._layout, self._pool.indexes[group].pages
        in_index = self._pool.arena(group).published
        skims = not layout.retains_all[group]
        if not skims and known.keys().isdisjoint([key for _, _, key, _ in entries]):
            if not any([in_index[page] for _, page, _, _ in entries]):
                return entries
        return [
            entry
            for number, entry in enumerate(entries, start=first)
            if entry[2] not in known and not in_index[entry[1]] and not (skims and not layout.retains(group, number))
        ]

    def _report(
        self, sequence: SequenceKV, group: int, first: int, entries: list[PageEntry], worth: list[PageEntry]
    ) -> None:
        assert self._observer is not None
        known = self._pool.indexes[group].pages
        new = {page for _, page, _, _ in worth}
        for number, (_content, page, key, _parent) in enumerate(entries, start=first):
            if page in new:
                self._observer.published(sequence, group, number, page, key)
            elif key in known:
                self._observer.already_published(sequence, group, number, known[key])
