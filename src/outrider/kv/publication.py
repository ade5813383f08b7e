"""Entering pages into the prefix index: full, durable, and worth keeping."""

from __future__ import annotations

from collections.abc import Sequence
from struct import iter_unpack

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
        parent   = base at the page's start
        key      = base at the page's end, then the reach tokens after the page
        content  = the page's tokens: with the reach, what a hit inside the page is compared with
        """
        layout, chain = self._layout, sequence.chain
        size, reach = layout.groups[group].page_tokens, layout.reach[group]
        chain.extend(sequence.tokens, stop * size)
        step = size // layout.grain
        pages = sequence.groups[group].pages[first:stop]
        keys = chain.keys(sequence.tokens, size, reach, first, stop)
        parents = chain.bases[first * step : stop * step : step]
        data = sequence.tokens[first * size : stop * size].tobytes()
        contents = [content for (content,) in iter_unpack(f"{size * TOKEN_BYTES}s", data)]
        if chain.media:
            for place, start in enumerate(range(first * size, stop * size, size)):
                if chain.has_media(start, start + size + reach):
                    contents[place] = b""
        numbers: Sequence[int] = range(first, stop)
        if not self._all_new(group, pages, keys):
            places = self._new_places(sequence, group, first, pages, keys)
            numbers = [numbers[place] for place in places]
            pages = [pages[place] for place in places]
            keys = [keys[place] for place in places]
            parents = [parents[place] for place in places]
            contents = [contents[place] for place in places]
        if self._observer:
            for number, page, key in zip(numbers, pages, keys, strict=True):
                self._observer.published(sequence, group, number, page, key)
        self._pool.publish(group, pages, zip(pages, keys, parents, contents, strict=True))
        if self._observer:
            self._observer.offered(sequence, group, first, stop)

    def _all_new(self, group: int, pages: list[int], keys: list[bytes]) -> bool:
        """The common case: nobody has published any of this, and all of it is worth keeping."""
        in_index = self._pool.arena(group).published
        return (
            self._layout.retains_all[group]
            and self._pool.indexes[group].pages.keys().isdisjoint(keys)
            and not any(map(in_index.__getitem__, pages))
        )

    def _new_places(
        self, sequence: SequenceKV, group: int, first: int, pages: list[int], keys: list[bytes]
    ) -> list[int]:
        """Which of the pages from number `first` on to publish: those worth keeping that are not in the index yet."""
        layout, known, in_index = self._layout, self._pool.indexes[group].pages, self._pool.arena(group).published
        places = []
        for place, (page, key) in enumerate(zip(pages, keys, strict=True)):
            if key in known:
                if self._observer:
                    self._observer.already_published(sequence, group, first + place, known[key])
            elif not in_index[page] and layout.retains(group, first + place):
                places.append(place)
        return places
