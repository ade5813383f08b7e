"""What a new sequence may take from the cache: the target's hit, and what the drafter gets beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.kv.footprint import KVFootprint
from outrider.kv.intervals import NOTHING, Interval, page_count, pages_under
from outrider.kv.ledger import Load
from outrider.kv.loading import wanted
from outrider.kv.observer import Hit
from outrider.kv.search import GroupView, longest_common


def find_hit(views: Sequence[GroupView], num_target: int, footprint: KVFootprint, limit: int, *, draft: bool) -> Hit:
    """Search the cache. The target's hit never depends on the drafter, which takes what is cached next to it."""
    target = views[:num_target]
    end = longest_common(target if num_target == 1 else sorted(target, key=_slides), limit)
    if not draft:
        return Hit(end, 0, ())
    if footprint.rebuild:
        rebuilt_from = longest_common(views[num_target:], end)
        return Hit(
            end,
            0,
            tuple(Interval(view.spec.kind.needed(rebuilt_from).start, rebuilt_from) for view in views[num_target:]),
        )
    runs = [_latest_run(view, end, footprint) for view in views[num_target:]]
    # With nothing found, a hit within the reach can still be fed from the very beginning.
    nothing_found = 0 if end <= footprint.token_reach else end
    fed_from = min((run.end for run in runs if not run.empty), default=nothing_found)
    if fed_from < end and not all(_tap_rows_possible(view, end, end - fed_from) for view in target):
        # The rows that would feed the missing slots reach below what a window kept.
        runs = [run if run.end == end else Interval(end, end) for run in runs]
        fed_from = end
    return Hit(end, end - fed_from, tuple(Interval(min(run.start, fed_from), fed_from) for run in runs))


def _slides(view: GroupView) -> bool:
    """Whether the group has a window. Full groups are searched first, since they bound a hit quickly."""
    return view.spec.kind.slides


def shared_end(target: Sequence[GroupView], limit: int) -> int:
    """Returns how much of the sequence earlier sequences had in common with it, whether or not it can be hit.

    Full groups keep everything, so they tell. Where the hit is shorter, a window has moved on since; the end of
    the common prefix is then worth keeping for later sequences.
    """
    return min((view.longest(limit) for view in target if not _slides(view)), default=0)


def _tap_rows_possible(view: GroupView, end: int, tap_rows: int) -> bool:
    """Whether the group holds what tap rows read: they start before the hit and read further back than it needs."""
    needed = view.spec.kind.needed(end, tap_rows)
    return needed == view.spec.kind.needed(end) or view.holds(needed)


def _latest_run(view: GroupView, end: int, footprint: KVFootprint) -> Interval:
    """Returns the run of draft slots that ends nearest below `end`; within the reach, tap rows can close the gap."""
    needed = view.spec.kind.needed(end)
    if needed.empty:
        return Interval(end, end)
    if needed.start == 0:
        # In most cases the whole run is cached, from the beginning up to the reach.
        prefix_end = min(end, view.prefix_end(end))
        if prefix_end >= max(1, end - footprint.token_reach):
            return Interval(0, prefix_end)
    for run_end in range(end, max(0, end - footprint.token_reach - 1), -1):
        needed = view.spec.kind.needed(run_end)
        start = view.run_before(run_end, needed.start)
        if start < run_end and not (footprint.feed_reads_kv and start > needed.start):
            return Interval(start, run_end)
    return Interval(end, end)


class Placement(NamedTuple):
    """How one group of a new sequence is filled. Entries of `pages` are None where a fresh page goes."""

    first_page: int
    low: int
    """The first valid position: the start of the first page, or the end of the hit if no page is used."""
    published: int
    pages: list[int | None]
    shared: list[int]
    """Cached pages taken by reference."""
    copied: list[tuple[int, int, int]]
    """(page number, source page, slots): cached pages of which only the front is used."""
    loads: list[Load]


def place(view: GroupView, hold: Interval) -> Placement:
    """Turn the positions that a sequence will hold into pages: by reference, by copy, or to be loaded.

    pages            [   0   )[   1   )[   2   )
    hold                  [----------------)          page 2 is used in part, so it is copied
    """
    size = view.page_tokens
    numbers = pages_under(hold, size)
    if not numbers:
        return Placement(hold.end // size, hold.end, page_count(hold.end, size), [], [], [], [])
    first = numbers.start
    # The common case, a prefix of whole device pages, is one slice.
    whole = view.whole[first : min(len(view.whole), hold.end // size)]
    pages: list[int | None] = list(whole)
    shared, copied, loads = list(whole), [], []
    for number in numbers[len(whole) :]:
        found = view.find(number)
        used = min(size, hold.end - number * size)
        if found.page and used == size:
            shared.append(found.page)
            pages.append(found.page)
            continue
        pages.append(None)
        if found.page:
            copied.append((number, found.page, used))
        else:
            loads.append(Load(view.group, Interval(number * size, number * size + used), view.key(number)))
    published = first + (0 if loads else len(shared))
    return Placement(first, first * size, published, pages, shared, copied, loads)


class GroupAllocation(NamedTuple):
    """The pages that one group of a new sequence gets: from the cache, from a peer, and fresh ones."""

    view: GroupView
    placement: Placement
    pull: Interval

    @property
    def num_fresh(self) -> int:
        """Number of fresh pages: for copies, for loads, and for what a peer sends past what is placed."""
        placement = self.placement
        beyond = 0
        if not self.pull.empty:
            placed = placement.first_page + len(placement.pages)
            beyond = max(0, page_count(self.pull.end, self.view.page_tokens) - placed)
        return len(placement.copied) + len(placement.loads) + beyond


Offered = Mapping[int, Interval]
"""The positions that a peer holds of a sequence, per group."""


def allocate_from_cache(views: Sequence[GroupView], holds: Sequence[Interval]) -> list[GroupAllocation]:
    return [GroupAllocation(view, place(view, hold), NOTHING) for view, hold in zip(views, holds, strict=True)]


def allocate_with_peer(
    views: Sequence[GroupView], holds: Sequence[Interval], end: int, margin: int, offered: Offered
) -> list[GroupAllocation] | None:
    """Allocate for a start at `end`: what is cached, and the rest from a peer.

    Returns None if the offer does not cover what is needed.
    """
    allocations = []
    for view, hold in zip(views, holds, strict=True):
        kind = view.spec.kind
        pull = wanted(kind, end=end, margin=margin, held=hold, offered=offered.get(view.group, NOTHING))
        if pull is None:
            return None
        # Hold only the cached pages that the start at `end` needs; on failure the index has the rest.
        hold = Interval(max(hold.start, kind.needed(end, margin).start), hold.end)
        if not pull.empty and (hold.empty or pull.start > hold.end):
            hold = Interval(pull.start, pull.start)
        allocations.append(GroupAllocation(view, place(view, hold), pull))
    return allocations


def allocate_target(
    views: Sequence[GroupView], hit: Hit, end: int, margin: int, offered: Offered | None
) -> tuple[list[GroupAllocation], bool]:
    """Allocate the target groups, and say whether the peer's offer is used. An offer that is too short is ignored."""
    holds = [view.spec.kind.needed(hit.end, hit.tap_rows) for view in views]
    allocations = None if offered is None else allocate_with_peer(views, holds, end, margin, offered)
    return (allocate_from_cache(views, holds), False) if allocations is None else (allocations, True)


def allocate_draft(
    views: Sequence[GroupView], hit: Hit, end: int, margin: int, offered: Offered | None
) -> list[GroupAllocation]:
    """Allocate the draft groups. A run that does not start where the need does is pulled whole rather than patched."""
    runs = hit.draft
    if offered is not None and views:
        whole = all(run.start <= view.spec.kind.needed(run.end).start for view, run in zip(views, runs, strict=True))
        held = runs if whole else [Interval(run.end, run.end) for run in runs]
        allocations = allocate_with_peer(views, held, max(end, runs[0].end), margin, offered)
        if allocations is not None:
            return allocations
    return allocate_from_cache(views, runs)
