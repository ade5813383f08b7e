"""Entering pages into the prefix index: full, durable, and worth keeping by the policy's mask.

tokens   | page first ... page stop-1 | reach |
parent   = base at the page's start
key      = base at the page's end, then the reach tokens after the page
content  = the page's tokens: with the reach, what a hit inside the page is compared with
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from struct import unpack
from typing import NamedTuple

from outrider.kv.layout import KVLayout
from outrider.kv.ledger import SequenceKV
from outrider.kv.observer import KVObserver, PublishedPage
from outrider.kv.pages import NULL_PAGE
from outrider.kv.pool import PagePool
from outrider.kv.prefix import TOKEN_BYTES
from outrider.kv.retention import Marks, RetentionMask


class NewPage(NamedTuple):
    """A page that has just entered the index, and that tiers behind the device may take over."""

    group: int
    page_number: int
    page: int
    key: bytes
    parent: bytes
    """The base of the chain where the page starts."""
    marks: Marks
    sequence: str


class GroupPublisher:
    """Publishes the pages of one group."""

    def __init__(
        self, group: int, layout: KVLayout, mask: RetentionMask, pool: PagePool, observer: KVObserver | None
    ) -> None:
        self._group = group
        self._mask = mask
        self._observer = observer
        self._size = layout.groups[group].page_tokens
        self._reach = layout.reach[group]
        self._step = self._size // layout.grain
        self._keeps_all = mask.keeps_all[group]
        self._index = pool.indexes[group]
        self._published = pool.arena(group).published
        self.new_pages: list[NewPage] | None = None
        """Where pages are noted for the tiers behind the device; None if there are no tiers."""
        self._listener = pool.listener if group < layout.num_target else None

    def publish(self, sequence: SequenceKV, first: int, stop: int) -> None:
        """Publish the pages of [first, stop) that are worth keeping; all slots are durable and their reach is known."""
        if not self._keeps_all:
            self.publish_marked(sequence, first, stop)
        else:
            sequence.chain.extend(sequence.tokens, stop * self._size)
            if stop - first == 1 and not sequence.chain.media and not self._observer:
                self._publish_one(sequence, first)
            else:
                self._publish_run(sequence, first, stop)

    def publish_marked(self, sequence: SequenceKV, first: int, stop: int) -> None:
        """Publish the pages of [first, stop) that the policy or the sequence's marks ask for."""
        sequence.chain.extend(sequence.tokens, stop * self._size)
        for start, end in self._mask.runs(self._group, first, stop, sequence.marks):
            self._publish_run(sequence, start, end)

    def _publish_run(self, sequence: SequenceKV, first: int, stop: int) -> None:
        """Publish pages [first, stop), as far as they are not in the index yet."""
        chain, tokens, size, step = sequence.chain, sequence.tokens, self._size, self._step
        pages = sequence.groups[self._group].pages[first:stop]
        keys = chain.keys(tokens, size, self._reach, first, stop)
        parents = chain.bases[first * step : stop * step : step]
        data = tokens[first * size : stop * size].tobytes()
        contents = unpack(f"{size * TOKEN_BYTES}s" * (stop - first), data)
        numbers: Sequence[int] = range(first, stop)
        if chain.media:
            contents = tuple(
                b"" if chain.has_media(number * size, (number + 1) * size + self._reach) else content
                for number, content in zip(numbers, contents, strict=True)
            )
        if not self._all_new(pages, keys):
            places = self._new_places(sequence, first, pages, keys)
            numbers = [numbers[place] for place in places]
            pages = [pages[place] for place in places]
            keys = [keys[place] for place in places]
            parents = [parents[place] for place in places]
            contents = tuple(contents[place] for place in places)
        if self._observer:
            for number, page, key in zip(numbers, pages, keys, strict=True):
                self._observer.published(sequence, self._group, number, page, key)
        self._index.insert(zip(pages, keys, parents, contents, strict=True))
        if self._listener is not None and keys:
            self._tell(sequence, numbers, keys, contents)
        published, mark = self._published, self._group + 1
        for page in pages:
            published[page] = mark
        if self.new_pages is not None:
            for number, page, key, parent in zip(numbers, pages, keys, parents, strict=True):
                self.new_pages.append(NewPage(self._group, number, page, key, parent, sequence.marks, sequence.id))

    def _publish_one(self, sequence: SequenceKV, number: int) -> None:
        """Publish one page of a sequence without media or observer, the common case of decoding."""
        size, bases, step = self._size, sequence.chain.bases, self._step
        start, page = number * size, sequence.groups[self._group].pages[number]
        key = bases[(number + 1) * step]
        if self._reach:
            key += sequence.tokens[start + size : start + size + self._reach].tobytes()
        if key not in self._index.pages and not self._published[page]:
            content = sequence.tokens[start : start + size].tobytes()
            self._index.insert(((page, key, bases[number * step], content),))
            self._published[page] = self._group + 1
            if self.new_pages is not None:
                parent, marks = bases[number * step], sequence.marks
                self.new_pages.append(NewPage(self._group, number, page, key, parent, marks, sequence.id))
            if self._listener is not None:
                self._tell(sequence, (number,), (key,), (content,))

    def _tell(
        self, sequence: SequenceKV, numbers: Sequence[int], keys: Sequence[bytes], contents: Sequence[bytes]
    ) -> None:
        assert self._listener is not None
        bases, step = sequence.chain.bases, self._step
        pages = [
            PublishedPage(key, bases[number * step : (number + 1) * step + 1], number * self._size, content)
            for number, key, content in zip(numbers, keys, contents, strict=True)
        ]
        self._listener.entered(self._group, sequence.namespace, pages)

    def _all_new(self, pages: list[int], keys: list[bytes]) -> bool:
        """Whether none of the pages is published under any key, the common case of prompts."""
        return self._index.knows_none(keys) and not any(itemgetter(NULL_PAGE, *pages)(self._published))

    def _new_places(self, sequence: SequenceKV, first: int, pages: list[int], keys: list[bytes]) -> list[int]:
        """Returns the places, among these pages from number `first` on, of those that are not in the index yet."""
        known, places = self._index.pages, []
        for place, (page, key) in enumerate(zip(pages, keys, strict=True)):
            if key in known:
                if self._observer:
                    self._observer.already_published(sequence, self._group, first + place, known[key])
            elif not self._published[page]:
                places.append(place)
        return places
