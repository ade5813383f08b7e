"""Prefix keys and the index from keys to pages.

One chain per sequence, over blocks of `grain` tokens (the greatest common divisor of all page sizes):

    base(0) = H(identity, adapter, salt)            base(i) = H(base(i-1), raw bytes of block i)

A group with pages of P tokens reads every (P / grain)-th base. Its key for a page is the base at the
page's end, followed by the `reach` tokens after the page: slots of such a group depend on them. Each
group has an index of its own; where keys leave the process, the group's tag is put in front.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from operator import itemgetter
from struct import iter_unpack
from typing import NamedTuple, Protocol

from outrider.kv.footprint import GroupSpec, KVFootprint

TOKEN_BYTES = 4
DIGEST_BYTES = 32
_EMPTY = blake2b(digest_size=DIGEST_BYTES)
"""Copying an empty hasher costs half of constructing one."""


def _digest_of_fields(fields: Iterable[bytes]) -> bytes:
    """Hash a list of byte strings; lengths go in front, so that no two lists look alike."""
    hasher = _EMPTY.copy()
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheIdentity:
    """Everything, apart from the tokens, that makes the target's KV bytes what they are."""

    weights: str = "unset"
    dtype: str = "float32"
    layout: str = "default"
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1

    @property
    def label(self) -> str:
        """All of it in one line, for handshakes and messages; equal only if everything is."""
        part = f"part {self.tensor_parallel_rank} of {self.tensor_parallel_size}"
        return f"weights {self.weights!r}, dtype {self.dtype!r}, layout {self.layout!r}, {part}"

    def root(self, *, adapter: str = "", salt: str = "") -> bytes:
        """The chain's seed for one adapter and one tenant."""
        fields = (
            self.weights,
            self.dtype,
            self.layout,
            str(self.tensor_parallel_rank),
            str(self.tensor_parallel_size),
            adapter,
            salt,
        )
        return _digest_of_fields(field.encode() for field in fields)


def group_tag(spec: GroupSpec, *, reach: int, owner: KVFootprint | None) -> bytes:
    """What tells this group's pages from any other group's, in any process."""
    fields = [spec.name, spec.kind.label, str(spec.page_tokens), str(spec.slot_bytes), str(reach)]
    if owner is not None:
        fields += [owner.fingerprint, *map(str, owner.taps)]
    return _digest_of_fields(field.encode() for field in fields)


class Media(NamedTuple):
    """Positions whose token ids are placeholders: the content's digest stands for them."""

    start: int
    end: int
    digest: bytes


class Chain:
    """The bases of one sequence, extended as tokens become known."""

    __slots__ = ("bases", "grain", "media")

    def __init__(self, root: bytes, grain: int, media: tuple[Media, ...] = ()) -> None:
        self.bases = [root]
        self.grain = grain
        self.media = media

    def extend(self, tokens: array[int], end: int) -> None:
        """Hash every whole block of tokens[:end] that is not hashed yet."""
        bases, grain = self.bases, self.grain
        done = len(bases) - 1
        blocks = end // grain
        if blocks <= done:
            return
        data = tokens[done * grain : blocks * grain].tobytes()
        width = grain * TOKEN_BYTES
        copy, base = _EMPTY.copy, bases[-1]
        append = bases.append
        start = done * grain
        for (block,) in iter_unpack(f"{width}s", data):
            hasher = copy()
            hasher.update(base + block)
            if self.media:
                hasher.update(self._media_bytes(start, start + grain))
                start += grain
            base = hasher.digest()
            append(base)

    def truncate(self, end: int) -> None:
        """Forget blocks that are not wholly below `end`."""
        del self.bases[end // self.grain + 1 :]

    def successors(self, tokens: array[int], end: int, reach: int) -> bytes:
        """What stands for the `reach` tokens from `end` on, in a key."""
        data = tokens[end : end + reach].tobytes()
        return data + self._media_bytes(end, end + reach) if self.media else data

    def has_media(self, start: int, end: int) -> bool:
        return any(item.start < end and start < item.end for item in self.media)

    def _media_bytes(self, start: int, end: int) -> bytes:
        """Each item that overlaps [start, end): what part of it lies where, and its content."""
        parts = []
        for item in self.media:
            first, stop = max(item.start, start), min(item.end, end)
            if first < stop:
                edges = (first - start, stop - start, first - item.start, len(item.digest))
                parts.append(b"".join(edge.to_bytes(8, "little") for edge in edges) + item.digest)
        return b"".join(parts)


PageEntry = tuple[bytes, int, bytes, bytes]
"""One page to publish: (content, page, key, parent). `content` is its tokens and the reach after them, or
empty if it holds media."""

RUN_PAGES = 16
"""Pages published together are also remembered in runs of this many, so that long hits take few look-ups."""


class Tier(Protocol):
    """A place besides the device where pages may be found."""

    def contains(self, group: int, key: bytes) -> bool: ...


class GroupIndex:
    """Published pages of one group, by key and, for hits that end inside a page, by parent.

    Tables with an item for each page hold bytes and numbers only: the garbage collector never walks through
    such dicts, so a full cache does not lengthen its pauses.
    """

    __slots__ = ("_branches", "_children", "_contents", "_generations", "_keys", "_parents", "_runs", "pages")

    def __init__(self, generations: list[int]) -> None:
        """`generations` counts, per page of the arena, how often it left an index."""
        self.pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._contents: dict[int, bytes] = {}
        self._parents: dict[int, bytes] = {}
        self._children: dict[bytes, int] = {}
        """One page after each parent: most have no other."""
        self._branches: dict[bytes, list[tuple[bytes, int]]] = {}
        """(content, page) of all pages after a parent, sorted, where sequences part ways."""
        self._runs: dict[bytes, tuple[tuple[int, ...], Callable[[list[int]], object], object]] = {}
        """Key of a run's last page -> its pages, and their generations when it was remembered."""
        self._generations = generations

    def __len__(self) -> int:
        return len(self.pages)

    def insert(self, new: Iterable[PageEntry]) -> None:
        pages, keys, contents, parents = self.pages, self._keys, self._contents, self._parents
        first_child = self._children.setdefault
        for content, page, key, parent in new:
            pages[key] = page
            keys[page] = key
            if content:
                contents[page] = content
                parents[page] = parent
                sibling = first_child(parent, page)
                if sibling != page:
                    self._branch(parent, sibling, page)

    def _branch(self, parent: bytes, sibling: int, page: int) -> None:
        siblings = self._branches.get(parent)
        if siblings is None:
            siblings = self._branches[parent] = [(self._contents[sibling], sibling)]
        insort(siblings, (self._contents[page], page))

    def remove_page(self, page: int) -> None:
        key = self._keys.pop(page)
        del self.pages[key]
        self._generations[page] += 1
        self._runs.pop(key, None)
        content = self._contents.pop(page, None)
        if content is None:
            return
        parent = self._parents.pop(page)
        siblings = self._branches.get(parent)
        if siblings is None:
            del self._children[parent]
            return
        del siblings[bisect_left(siblings, (content, page))]
        self._children[parent] = siblings[0][1]
        if len(siblings) == 1:
            del self._branches[parent]

    def clear(self) -> None:
        for page in self._keys:
            self._generations[page] += 1
        self._runs.clear()
        for table in (self.pages, self._keys, self._contents, self._parents, self._children, self._branches):
            table.clear()

    def remember_run(self, key: bytes, pages: list[int]) -> None:
        """RUN_PAGES pages that follow each other, the last of them under `key`; all have just been inserted."""
        generations_of = itemgetter(*pages)
        self._runs[key] = (tuple(pages), generations_of, generations_of(self._generations))

    def run_ending(self, key: bytes) -> tuple[int, ...]:
        """The run whose last page has this key, if none of its pages has left the index since."""
        run = self._runs.get(key)
        if run is None:
            return ()
        pages, generations_of, generations = run
        return pages if generations_of(self._generations) == generations else ()

    def closest(self, parent: bytes, content: bytes) -> tuple[int, int]:
        """The page after `parent` that agrees longest with `content`, and how many tokens agree.

        Among sorted byte strings the one with the longest common prefix is a neighbour of the place where
        the wanted one would stand, so the cost does not grow with the number of siblings.
        """
        child = self._children.get(parent)
        if child is None:
            return (0, 0)
        siblings = self._branches.get(parent)
        if siblings is None:
            candidates = [(self._contents[child], child)]
        else:
            place = bisect_left(siblings, (content, 0))
            candidates = siblings[max(0, place - 1) : place + 1]
        best_page, best_tokens = 0, 0
        for known, page in candidates:
            tokens = _common_tokens(known, content)
            if tokens > best_tokens:
                best_page, best_tokens = page, tokens
        return (best_page, best_tokens)


def _common_tokens(left: bytes, right: bytes) -> int:
    """Whole tokens before the first bit that differs."""
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not differing:
        return size // TOKEN_BYTES
    lowest_bit = (differing & -differing).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)
