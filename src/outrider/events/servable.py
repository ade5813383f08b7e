"""Which cached pages of the target can serve a hit: what is announced to routers, and nothing else.

A page in the prefix index serves no hit by itself. A hit needs everything that a full group holds before its end, and
in a group with a window everything under the window. So the index is mirrored here as a tree of blocks:

    block     `grain` tokens after a given prefix, known by the base of the chain at its end
    run       where the stretch of blocks that a group holds without a gap, and that ends with this block, begins
    end       a block after which a hit may end: each group's run begins where the group's needs begin, or before
    page      can serve a hit if such a hit reads any of it: if there is an end inside it, or after it and near enough

Changes are noted by the engine's thread and worked off by `take`, which returns the differences. Pages that hold media
are never announced, since their token ids are placeholders, and neither is what only they connect to the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import repeat
from typing import NamedTuple

from outrider.kv.layout import KVLayout
from outrider.kv.observer import PublishedPage

NOWHERE = 1 << 62
"""Position of an end that does not exist."""


class ServablePage(NamedTuple):
    """A page to announce."""

    group: int
    key: bytes
    parent: bytes | None
    """The base at the page's start; None where the page begins its text."""
    start: int
    content: bytes
    namespace: tuple[str, str]
    """The adapter and the salt."""


class Changes(NamedTuple):
    """The difference between two moments, in the order in which a router can apply it."""

    cleared: bool
    """Whether everything announced before is gone."""
    removed: tuple[tuple[int, bytes], ...]
    """(group, key) of pages that serve no hit any more."""
    stored: tuple[ServablePage, ...]
    """Pages that can serve a hit now; those of one text in their order."""

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed) or bool(self.stored)


class Entered(NamedTuple):
    group: int
    namespace: tuple[str, str]
    pages: list[PublishedPage]


class Left(NamedTuple):
    group: int
    keys: list[bytes]


class Cleared(NamedTuple):
    pass


Note = Entered | Left | Cleared
"""One change of the prefix index."""


@dataclass(eq=False, slots=True)
class _Block:
    base: bytes
    parent_base: bytes
    end: int
    """Position after its last token."""
    parent: _Block | None
    """None at the beginning of a text, and while no page holds the block before this one."""
    children: list[_Block]
    held: list[int]
    """Number of pages that hold the block, per group."""
    run: list[int]
    pages: list[_Page] = field(default_factory=list)
    is_end: bool = False
    nearest: int = NOWHERE
    """The first position at which a hit may end, after this block or after one behind it."""

    def nearest_end(self) -> int:
        return self.end if self.is_end else min((child.nearest for child in self.children), default=NOWHERE)


@dataclass(eq=False, slots=True)
class _Page:
    about: ServablePage
    end: int
    blocks: list[_Block]
    is_indexed: bool = True
    is_announced: bool = False


_Blocks = dict[int, _Block]
_Pages = dict[int, _Page]
"""By identity, in the order in which they were met."""


class ServablePages:
    """The listener of a prefix index that knows which of its pages can serve a hit."""

    def __init__(self, layout: KVLayout) -> None:
        self._grain = layout.grain
        self._groups = layout.target_groups
        self._kinds = [layout.groups[group].kind for group in self._groups]
        self._notes: list[Note] = []
        self._forget_all()

    def _forget_all(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._orphans: dict[bytes, list[_Block]] = {}
        """Blocks of which the one before is not held, by that one's base."""
        self._pages: dict[tuple[int, bytes], _Page] = {}
        self._touched: _Blocks = {}
        """Blocks that pages have come to hold or ceased to hold."""
        self._gone: list[_Page] = []
        """Announced pages that have left the index."""

    # ---- the listener, in the engine's thread ------------------------------------------------------

    def entered(self, group: int, namespace: tuple[str, str], pages: Sequence[PublishedPage]) -> None:
        self._notes.append(Entered(group, namespace, list(pages)))

    def left(self, group: int, keys: Sequence[bytes]) -> None:
        self._notes.append(Left(group, list(keys)))

    def cleared(self) -> None:
        self._notes = [Cleared()]

    def take_notes(self) -> list[Note]:
        """Returns what has changed since the last call, for `work_off`, which another thread may call."""
        notes, self._notes = self._notes, []
        return notes

    # ---- the differences ---------------------------------------------------------------------------

    def take(self) -> Changes:
        """Returns what routers have to be told since the last call."""
        return self.work_off(self.take_notes())

    def work_off(self, notes: Sequence[Note]) -> Changes:
        """Apply the notes, and return what routers have to be told."""
        cleared = False
        for note in notes:
            match note:
                case Entered():
                    for page in note.pages:
                        if page.content:
                            self._enter(note.group, note.namespace, page)
                case Left():
                    for key in note.keys:
                        self._leave(note.group, key)
                case Cleared():
                    cleared = True
                    self._forget_all()
        asked: _Pages = {}
        looked = self._renew_runs(asked)
        self._renew_nearest(looked + self._drop_bare_blocks(), asked)
        return self._differences(asked, cleared=cleared)

    def _enter(self, group: int, namespace: tuple[str, str], new: PublishedPage) -> None:
        blocks: list[_Block] = []
        for place, base in enumerate(new.bases[1:]):
            block = self._blocks.get(base)
            if block is None:
                block = self._new_block(base, new.bases[place], new.start + (place + 1) * self._grain)
            block.held[group] += 1
            self._touched[id(block)] = block
            blocks.append(block)
        about = ServablePage(group, new.key, new.bases[0] if new.start else None, new.start, new.content, namespace)
        page = self._pages[group, new.key] = _Page(about, blocks[-1].end, blocks)
        for block in blocks:
            block.pages.append(page)

    def _new_block(self, base: bytes, parent_base: bytes, end: int) -> _Block:
        count, parent = len(self._kinds), self._blocks.get(parent_base)
        block = _Block(base, parent_base, end, parent, self._orphans.pop(base, []), [0] * count, [end] * count)
        self._blocks[base] = block
        self._siblings(block).append(block)
        for child in block.children:
            child.parent = block
            self._touched[id(child)] = child
        return block

    def _siblings(self, block: _Block) -> list[_Block]:
        """Returns the list that the block belongs to: its parent's children, or those who wait for the parent."""
        return self._orphans.setdefault(block.parent_base, []) if block.parent is None else block.parent.children

    def _leave(self, group: int, key: bytes) -> None:
        page = self._pages.pop((group, key), None)
        if page is None:
            return  # it holds media
        page.is_indexed = False
        if page.is_announced:
            self._gone.append(page)
        for block in page.blocks:
            block.held[group] -= 1
            block.pages.remove(page)
            self._touched[id(block)] = block

    def _renew_runs(self, asked: _Pages) -> list[_Block]:
        """Work out the runs of the touched blocks and of those behind them; returns the blocks looked at."""
        queue = [(block.end, identity, block) for identity, block in self._touched.items()]
        heapify(queue)
        looked: _Blocks = {}
        while queue:
            end, identity, block = heappop(queue)
            if identity in looked:
                continue
            looked[identity] = block
            before = end - self._grain
            runs = [
                end if not held else before if block.parent is None else block.parent.run[group]
                for group, held in enumerate(block.held)
            ]
            is_end = all(map(self._is_met, self._groups, repeat(end), runs))
            if is_end != block.is_end or identity in self._touched:
                block.is_end = is_end
                asked |= {id(page): page for page in block.pages}
            if runs != block.run:
                block.run = runs
                for child in block.children:
                    heappush(queue, (child.end, id(child), child))
        return list(looked.values())

    def _is_met(self, group: int, end: int, run: int) -> bool:
        needed = self._kinds[group].needed(end)
        return needed.empty or run <= needed.start

    def _drop_bare_blocks(self) -> list[_Block]:
        """Forget blocks that no page holds any more, so that those behind wait for them to come back. Returns the
        blocks before them."""
        before = []
        for block in self._touched.values():
            if any(block.held):
                continue
            del self._blocks[block.base]
            siblings = self._siblings(block)
            siblings.remove(block)
            if block.parent is not None:
                before.append(block.parent)
            elif not siblings:
                del self._orphans[block.parent_base]
            for child in block.children:
                child.parent = None
            if block.children:
                self._orphans[block.base] = block.children
        self._touched.clear()
        return before

    def _renew_nearest(self, looked: list[_Block], asked: _Pages) -> None:
        """Tell the blocks before them where the nearest end is."""
        queue = [(-block.end, id(block), block) for block in looked if any(block.held)]
        heapify(queue)
        while queue:
            _place, _identity, block = heappop(queue)
            nearest, parent = block.nearest_end(), block.parent
            if nearest == block.nearest:
                continue
            block.nearest = nearest
            asked |= {id(page): page for page in block.pages}
            if parent is not None:
                heappush(queue, (-parent.end, id(parent), parent))

    def _differences(self, asked: _Pages, *, cleared: bool) -> Changes:
        removed = {(page.about.group, page.about.key) for page in self._gone}
        self._gone.clear()
        stored = []
        for page in asked.values():
            serves = page.is_indexed and self._can_serve(page)
            if serves and not page.is_announced:
                stored.append(page.about)
            elif page.is_announced and page.is_indexed and not serves:
                removed.add((page.about.group, page.about.key))
            page.is_announced = serves
        # A page that left the index and came back meanwhile is as it was.
        back = removed & {(page.group, page.key) for page in stored}
        stored = sorted(
            (page for page in stored if (page.group, page.key) not in back), key=lambda page: (page.group, page.start)
        )
        return Changes(cleared, tuple(sorted(removed - back)), tuple(stored))

    def _can_serve(self, page: _Page) -> bool:
        """Whether a hit that is possible now reads a part of the page."""
        kind = self._kinds[page.about.group]
        if any(block.is_end and not kind.needed(block.end).empty for block in page.blocks):
            return True
        nearest = page.blocks[-1].nearest
        return nearest < NOWHERE and kind.needed(nearest).start < page.end
