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
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from operator import add
from struct import unpack
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
    """Everything, apart from the tokens, that determines the target's KV bytes."""

    weights: str = "unset"
    dtype: str = "float32"
    layout: str = "default"
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1

    @property
    def label(self) -> str:
        """The whole identity as text, for handshakes and messages; equal only if every field is."""
        part = f"part {self.tensor_parallel_rank} of {self.tensor_parallel_size}"
        return f"weights {self.weights!r}, dtype {self.dtype!r}, layout {self.layout!r}, {part}"

    def root(self, *, adapter: str = "", salt: str = "") -> bytes:
        """Returns the first base of the chain for one adapter and one tenant."""
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
    """Returns a digest that tells this group's pages from any other group's, in any process."""
    fields = [spec.name, spec.kind.label, str(spec.page_tokens), str(spec.slot_bytes), str(reach)]
    if owner is not None:
        fields += [owner.fingerprint, *map(str, owner.taps)]
    return _digest_of_fields(field.encode() for field in fields)


class Media(NamedTuple):
    """Positions whose token ids are placeholders: the content's digest stands for them."""

    start: int
    end: int
    digest: bytes


RUN_BLOCKS = 16
"""Number of blocks in one remembered run."""
MOST_YOUNG_RUNS = 1024
"""Most runs in the young generation; a run takes some 2 to 4 KB at 16 tokens a block."""


class KnownRun:
    """The bases of one run of blocks, and the keys that end in it."""

    __slots__ = ("bases", "keys")

    def __init__(self, bases: list[bytes]) -> None:
        self.bases = bases
        self.keys: dict[tuple[int, int], list[bytes]] = {}
        """Keys by (page_tokens, reach), of all pages of the run but the last, whose reach lies in the next run."""


class KnownRuns:
    """Runs of blocks that were hashed before: a prefix that many requests share is hashed once.

    A run is known by what its hashing would read, the base before it and its raw tokens, compared in full.
    When the young generation is full it becomes the old one; what is asked for again becomes young again.
    """

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young: dict[bytes, KnownRun] = {}
        self._old: dict[bytes, KnownRun] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, hashed: bytes) -> KnownRun | None:
        run = self._young.get(hashed)
        if run is None:
            run = self._old.pop(hashed, None)
            if run is not None:
                self.add(hashed, run)
        return run

    def add(self, hashed: bytes, run: KnownRun) -> None:
        if len(self._young) >= MOST_YOUNG_RUNS:
            self._old, self._young = self._young, {}
        self._young[hashed] = run


class Chain:
    """The bases of one sequence, extended as tokens become known."""

    __slots__ = ("_known_runs", "_runs", "bases", "grain", "media")

    def __init__(
        self, root: bytes, grain: int, media: tuple[Media, ...] = (), known_runs: KnownRuns | None = None
    ) -> None:
        self.bases = [root]
        self.grain = grain
        self.media = media
        self._known_runs = None if media else known_runs
        self._runs: list[KnownRun] = []
        """The first runs of the sequence, in order and without a gap."""

    def extend(self, tokens: array[int], end: int) -> None:
        """Hash every whole block of tokens[:end] that is not hashed yet."""
        bases, grain = self.bases, self.grain
        done = len(bases) - 1
        blocks = end // grain
        if blocks <= done:
            return
        data = tokens[done * grain : blocks * grain].tobytes()
        if self._known_runs is not None and done == RUN_BLOCKS * len(self._runs):
            data = self._extend_by_runs(self._known_runs, data)
        bases += self._hashed(data, (len(bases) - 1) * grain)

    def _extend_by_runs(self, known_runs: KnownRuns, data: bytes) -> bytes:
        """Take whole runs of blocks off the front of `data`; return the rest."""
        bases, run_bytes = self.bases, RUN_BLOCKS * self.grain * TOKEN_BYTES
        stop = len(data) - len(data) % run_bytes
        for offset in range(0, stop, run_bytes):
            block_bytes = data[offset : offset + run_bytes]
            hashed = bases[-1] + block_bytes
            run = known_runs.get(hashed)
            if run is None:
                run = KnownRun(self._hashed(block_bytes, (len(bases) - 1) * self.grain))
                known_runs.add(hashed, run)
            bases += run.bases
            self._runs.append(run)
        return data[stop:]

    def _hashed(self, data: bytes, start: int) -> list[bytes]:
        """Returns the bases of the blocks in `data`, the first of which starts at position `start`."""
        hashed: list[bytes] = []
        append, copy, base, width = hashed.append, _EMPTY.copy, self.bases[-1], self.grain * TOKEN_BYTES
        blocks = unpack(f"{width}s" * (len(data) // width), data)
        if self.media:
            starts = range(start, start + len(blocks) * self.grain, self.grain)
            blocks = tuple(
                block + self._media_bytes(start, start + self.grain)
                for block, start in zip(blocks, starts, strict=True)
            )
        for block in blocks:
            hasher = copy()
            hasher.update(base + block)
            base = hasher.digest()
            append(base)
        return hashed

    def forget(self) -> None:
        """Drop all bases but the root: an interrupted `extend` may have left them incomplete."""
        del self.bases[1:]
        self._runs.clear()

    def successors(self, tokens: array[int], end: int, reach: int) -> bytes:
        """Returns the part of a key that stands for the `reach` tokens from `end` on."""
        data = tokens[end : end + reach].tobytes()
        return data + self._media_bytes(end, end + reach) if self.media else data

    def keys(self, tokens: array[int], size: int, reach: int, first: int, stop: int) -> list[bytes]:
        """Returns the keys of pages [first, stop) of `size` tokens, whose tokens and reach are all known."""
        step = size // self.grain
        if not reach:
            return self.bases[(first + 1) * step : stop * step + 1 : step]
        keys: list[bytes] = []
        pages = RUN_BLOCKS // step if RUN_BLOCKS % step == 0 else 0
        while pages and first < stop and first % pages == 0 and first // pages < len(self._runs):
            known, last = self._runs[first // pages].keys, first + pages - 1
            if (size, reach) not in known:
                known[size, reach] = self._joined_keys(tokens, size, reach, first, last)
            keys += known[size, reach][: stop - first]
            if last < stop:
                end = (last + 1) * size
                keys.append(self.bases[(last + 1) * step] + self.successors(tokens, end, reach))
            first += pages
        return keys + self._joined_keys(tokens, size, reach, first, stop) if first < stop else keys

    def _joined_keys(self, tokens: array[int], size: int, reach: int, first: int, stop: int) -> list[bytes]:
        """Returns the keys of pages [first, stop), each made of a base and the tokens after it."""
        step = size // self.grain
        bases = self.bases[(first + 1) * step : stop * step + 1 : step]
        if self.media:
            ends = range((first + 1) * size, (stop + 1) * size, size)
            return [base + self.successors(tokens, end, reach) for base, end in zip(bases, ends, strict=True)]
        stride, width = size * TOKEN_BYTES, reach * TOKEN_BYTES
        after = tokens[(first + 1) * size : stop * size + reach].tobytes().ljust((stop - first) * stride)
        return list(map(add, bases, unpack(f"{width}s{stride - width}x" * (stop - first), after)))

    def has_media(self, start: int, end: int) -> bool:
        return any(item.start < end and start < item.end for item in self.media)

    def _media_bytes(self, start: int, end: int) -> bytes:
        """Returns bytes that say which part of which media item lies where in [start, end)."""
        parts = []
        for item in self.media:
            first, stop = max(item.start, start), min(item.end, end)
            if first < stop:
                edges = (first - start, stop - start, first - item.start, len(item.digest))
                parts.append(b"".join(edge.to_bytes(8, "little") for edge in edges) + item.digest)
        return b"".join(parts)


class Tier(Protocol):
    """A place besides the device where pages may be cached."""

    def contains(self, group: int, key: bytes) -> bool:
        """Whether the page can be loaded from there. Called by the hit search, so it must not wait for anything."""


PageEntry = tuple[int, bytes, bytes, bytes]
"""One page to publish: (page, key, parent, content). `content` is its tokens, or empty if it holds media."""


class PageRecords:
    """What the index knows of each published page of one arena; a page is published in one group at a time.

    Lists by page, since they are written far more often than read.
    """

    __slots__ = ("contents", "keys", "parents")

    def __init__(self, num_pages: int) -> None:
        self.keys = [b""] * num_pages
        self.parents = [b""] * num_pages
        self.contents = [b""] * num_pages
        """Each page's tokens; empty if it holds media."""

    def text(self, page: int) -> bytes:
        """Returns the page's tokens and the reach after them, which its key ends with."""
        return self.contents[page] + self.keys[page][DIGEST_BYTES:]


class GroupIndex:
    """Published pages of one group, by key and, for hits that end inside a page, by parent.

    Tables with an item for each page hold bytes and numbers only: there is nothing in them for the garbage
    collector to follow, so a full cache hardly lengthens its pauses.
    """

    __slots__ = ("_branches", "_children", "_records", "pages")

    def __init__(self, records: PageRecords) -> None:
        self.pages: dict[bytes, int] = {}
        self._records = records
        self._children: dict[bytes, int] = {}
        """One page after each parent; most parents have no other."""
        self._branches: dict[bytes, list[tuple[bytes, int]]] = {}
        """(text, page) of all pages after a parent, sorted, where several sequences continue it."""

    def __len__(self) -> int:
        return len(self.pages)

    def knows_none(self, keys: list[bytes]) -> bool:
        """Whether no page is published under any of the keys."""
        return self.pages.keys().isdisjoint(keys)

    def continues_none(self, parents: list[bytes]) -> bool:
        """Whether no page of which a part may be taken follows any of the parents."""
        return self._children.keys().isdisjoint(parents)

    def insert(self, new: Iterable[PageEntry]) -> None:
        """Enter pages under new keys; neither the pages nor the keys may be in the index yet."""
        pages, records = self.pages, self._records
        keys, parents, contents, children = records.keys, records.parents, records.contents, self._children
        for page, key, parent, content in new:
            pages[key] = page
            keys[page] = key
            parents[page] = parent
            contents[page] = content
            if content:
                if parent in children:
                    self._branch(parent, page)
                else:
                    children[parent] = page

    def _branch(self, parent: bytes, page: int) -> None:
        text, siblings = self._records.text, self._branches.get(parent)
        if siblings is None:
            first = self._children[parent]
            siblings = self._branches[parent] = [(text(first), first)]
        insort(siblings, (text(page), page))

    def remove(self, gone: Iterable[int]) -> None:
        records, pages, children, branches = self._records, self.pages, self._children, self._branches
        keys, parents, contents = records.keys, records.parents, records.contents
        for page in gone:
            del pages[keys[page]]
            if not contents[page]:
                continue
            parent = parents[page]
            if parent in branches:
                self._unbranch(parent, page)
            else:
                del children[parent]

    def _unbranch(self, parent: bytes, page: int) -> None:
        siblings = self._branches[parent]
        del siblings[bisect_left(siblings, (self._records.text(page), page))]
        self._children[parent] = siblings[0][1]
        if len(siblings) == 1:
            del self._branches[parent]

    def clear(self) -> None:
        for table in (self.pages, self._children, self._branches):
            table.clear()

    def closest(self, parent: bytes, text: bytes) -> tuple[int, int]:
        """Returns the page after `parent` that agrees longest with `text`, and how many tokens agree.

        Among sorted byte strings the one with the longest common prefix is a neighbour of the place where
        the wanted one would stand, so the cost does not grow with the number of siblings.
        """
        child = self._children.get(parent)
        if child is None:
            return (0, 0)
        siblings = self._branches.get(parent)
        if siblings is None:
            candidates = [(self._records.text(child), child)]
        else:
            place = bisect_left(siblings, (text, 0))
            candidates = siblings[max(0, place - 1) : place + 1]
        best_page, best_tokens = 0, 0
        for known, page in candidates:
            tokens = _common_tokens(known, text)
            if tokens > best_tokens:
                best_page, best_tokens = page, tokens
        return (best_page, best_tokens)


def _common_tokens(left: bytes, right: bytes) -> int:
    """Returns the number of whole tokens before the first bit that differs."""
    size = min(len(left), len(right))
    if left[:TOKEN_BYTES] != right[:TOKEN_BYTES]:
        return 0  # the common case of sequences that part ways at the end of a page
    differing = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not differing:
        return size // TOKEN_BYTES
    lowest_bit = (differing & -differing).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)
