"""The patches behind the table of mutations: each takes the original and returns the broken version.

They are written against the real code's names, loosely typed on purpose: they are bugs, not features.
"""

from __future__ import annotations

from typing import Any

from outrider.errors import OutOfPages
from outrider.kv.footprint import KVFootprint
from outrider.kv.intervals import Interval

# ---- reservation and fit -------------------------------------------------------------------------------


def reserve_k_only(original: Any) -> Any:
    def reserve_end(self: KVFootprint, *, v: int, k: int) -> int:
        return v + max(self.durable_lead, k) if self.groups else 0

    return reserve_end


def no_lookahead_when_fresh(original: Any) -> Any:
    def reserve_end(self: Any, request: Any, v: int, k: int) -> int:
        return int(original(self, request, v, 0 if request.kv.committed == 0 else k))

    return reserve_end


def no_lookahead_after_hit(original: Any) -> Any:
    def reserve_end(self: Any, request: Any, v: int, k: int) -> int:
        first_after_hit = request.kv.hit > 0 and request.kv.committed == request.kv.hit
        return int(original(self, request, v, 0 if first_after_hit else k))

    return reserve_end


def fit_without_bonus(original: Any) -> Any:
    def fit(self: KVFootprint, *, k: int, v: int, max_model_len: int, remaining_tokens: int) -> int:
        k = min(k, max_model_len - v - 1, remaining_tokens - 1)
        return max(0, k if self.max_len is None else min(k, self.max_len - v))

    return fit


def ignore_plans_ahead(original: Any) -> Any:
    def commit(self: Any, sequence: Any, v: int, *, ahead: int = 0, **others: Any) -> None:
        original(self, sequence, v, ahead=0, **others)

    return commit


def trim_one_page_too_many(original: Any) -> Any:
    def trim(self: Any, sequence: Any, v: int) -> None:
        for g, size in self.holdings.groups(sequence):
            draft = g >= self.layout.num_target
            end = v + (sequence.draft_headroom if draft else sequence.target_headroom)
            self.holdings.cut(sequence, g, size, end - size)
        self.holdings.measure_room(sequence)

    return trim


def trim_one_page_too_few(original: Any) -> Any:
    def trim(self: Any, sequence: Any, v: int) -> None:
        for g, size in self.holdings.groups(sequence):
            draft = g >= self.layout.num_target
            end = v + (sequence.draft_headroom if draft else sequence.target_headroom)
            self.holdings.cut(sequence, g, size, end + size)
        self.holdings.measure_room(sequence)

    return trim


def drop_planned_drafts(original: Any) -> Any:
    def make_room(self: Any, request: Any, arena: int) -> bool:
        for other in self._roster.running_from_last():
            if other.rank > request.rank and other.planned_step == self._step and self._drafts_in(other.kv, arena):
                self._kv.drop_draft(other.kv)
                return not self._kv.pool.step_in_flight
        return bool(original(self, request, arena))

    return make_room


def keep_drafting_without_pages(original: Any) -> Any:
    def reserve(self: Any, sequence: Any, target_end: int, draft_end: int) -> None:
        holdings = self.holdings
        missing = holdings.missing(sequence, holdings.target, target_end)
        try:
            self.pool.require(missing + holdings.missing(sequence, holdings.draft, draft_end))
        except OutOfPages:
            draft_end = min(draft_end, sequence.draft_room)
        original(self, sequence, target_end, draft_end)

    return reserve


# ---- keys, publication, hits, retention ----------------------------------------------------------------


def keys_without_reach(original: Any) -> Any:
    def post_init(self: Any) -> None:
        original(self)
        object.__setattr__(self, "reach", (0,) * len(self.groups))

    return post_init


def salt_left_out(original: Any) -> Any:
    def root(self: Any, *, adapter: str = "", salt: str = "") -> bytes:
        return bytes(original(self, adapter=adapter, salt=""))

    return root


def adapter_left_out(original: Any) -> Any:
    def root(self: Any, *, adapter: str = "", salt: str = "") -> bytes:
        return bytes(original(self, adapter="", salt=salt))

    return root


def media_by_token_id(original: Any) -> Any:
    return lambda self, start, end: b""


def publish_last_sampled(original: Any) -> Any:
    def publish(self: Any, sequence: Any) -> None:
        early = int(sequence.target_room > sequence.committed and sequence.draft_room > sequence.draft_end)
        sequence.committed += early
        sequence.draft_end += early
        try:
            original(self, sequence)
        finally:
            sequence.committed -= early
            sequence.draft_end -= early

    return publish


def _without_margin(mask: Any) -> Any:
    mask._margins = (0,) * len(mask._margins)
    mask.keeps_all = tuple(map(mask._needs_all, range(len(mask.keeps_all))))
    return mask


def mask_without_margin(original: Any) -> Any:
    return lambda layout, retention: _without_margin(original(layout, retention))


def tier_mask_without_margin(name: str) -> Any:
    def change(original: Any) -> Any:
        def wants(self: Any, group: int, page_number: int, marks: Any) -> bool:
            if self.name == name:
                _without_margin(self._mask)
            return bool(original(self, group, page_number, marks))

        return wants

    return change


def mask_keeps_everything(original: Any) -> Any:
    def runs(self: Any, group: int, first: int, stop: int, marks: Any) -> Any:
        return [(first, stop)]

    return runs


def drafts_kept_for_boundaries_only(original: Any) -> Any:
    def make(layout: Any, retention: Any) -> Any:
        mask = original(layout, retention)
        mask.keeps_all = tuple(map(mask._needs_all, range(len(mask.keeps_all))))
        return mask

    return make


def drafts_kept_for_their_own_window(original: Any) -> Any:
    return lambda layout: (layout.margin,) * len(layout.groups)


def publish_target_groups_only(original: Any) -> Any:
    """Serves Progress.publish, and Progress.find_next_event, which says when to publish."""

    def with_target_groups(self: Any, sequence: Any) -> None:
        drafting, sequence.drafting = sequence.drafting, False
        try:
            original(self, sequence)
        finally:
            sequence.drafting = drafting

    return with_target_groups


def no_drafts_in_hits(original: Any) -> Any:
    def find_hit(views: Any, num_target: int, footprint: KVFootprint, limit: int, *, draft: bool) -> Any:
        hit = original(views, num_target, footprint, limit, draft=draft)
        return hit._replace(tap_rows=0, draft=tuple(Interval(hit.end, hit.end) for _ in hit.draft))

    return find_hit


def nothing_shared(original: Any) -> Any:
    return lambda target, limit: 0


def drop_last_block(original: Any) -> Any:
    def find_hit(views: Any, num_target: int, footprint: KVFootprint, limit: int, *, draft: bool) -> Any:
        hit = original(views, num_target, footprint, limit, draft=draft)
        if footprint.token_reach and draft and hit.end:
            shorter = max(0, hit.end - views[0].page_tokens)
            return original(views, num_target, footprint, shorter, draft=draft)
        return hit

    return find_hit


def hold_after_taking(original: Any) -> Any:
    class Holdings(original):  # type: ignore[misc]
        def hold(self, allocations: Any) -> None:
            """What the search found is held only once fresh pages were taken."""

        def let_go(self, allocations: Any) -> None:
            pass

        def fill(self, sequence: Any, allocation: Any) -> None:
            fresh = self.pool.acquire(allocation.view.group, allocation.num_fresh)
            original.hold(self, [allocation])
            self.pool.acquire = lambda group, count: fresh
            try:
                super().fill(sequence, allocation)
            finally:
                del self.pool.acquire

    return Holdings


def start_before_copies(original: Any) -> Any:
    return lambda self, sequence: not sequence.loading


def publish_failed_pages(original: Any) -> Any:
    def keep_run(self: Any, sequence: Any, g: int, size: int, parts: Any, end: int) -> None:
        state = sequence.groups[g]
        published = state.published
        original(self, sequence, g, size, parts, end)
        if state.low < end:
            state.published = published

    return keep_run


def share_instead_of_copy(original: Any) -> Any:
    def place(view: Any, hold: Interval) -> Any:
        placement = original(view, hold)
        for number, source, _slots in placement.copied:
            if view.find(number).slots < view.page_tokens:
                return placement
            placement.pages[number - placement.first_page] = source
            placement.shared.append(source)
        return placement._replace(copied=[])

    return place


# ---- freeing and page accounting -----------------------------------------------------------------------


def free_behind_speculation(original: Any) -> Any:
    def free_behind(self: Any, sequence: Any, margin: int) -> None:
        committed, draft_end = sequence.committed, sequence.draft_end
        sequence.committed += sequence.target_headroom
        sequence.draft_end += sequence.target_headroom
        try:
            original(self, sequence, margin)
        finally:
            sequence.committed, sequence.draft_end = committed, draft_end

    return free_behind


def free_behind_nothing(original: Any) -> Any:
    return lambda self, sequence, margin: None


def free_under_the_end(original: Any) -> Any:
    def held_from(self: Any, group: int, end: int, margin: int) -> int:
        return int(self._kinds[group].needed(end, margin).start)

    return held_from


def keep_ends_whole(original: Any) -> Any:
    def publish_end(self: Any, sequence: Any) -> None:
        states = [sequence.groups[group] for group in self.layout.target_groups]
        lows = [state.low for state in states]
        for state in states:
            state.low = 0
        original(self, sequence)
        for state, low in zip(states, lows, strict=True):
            state.low = low

    return publish_end


def free_under_tap_rows(original: Any) -> Any:
    def start_at(self: Any, sequence: Any, end: int) -> None:
        sequence.committed = end
        self.progress.advance(sequence, margin=0)
        self.holdings.measure_room(sequence)

    return start_at


def release_twice(original: Any) -> Any:
    def close(self: Any, sequence: Any, **others: Any) -> None:
        for group, state in enumerate(sequence.groups):
            self.holdings.give_back(group, state.held()[:1])
        original(self, sequence, **others)

    return close


def leak_on_abort(original: Any) -> Any:
    def abort(self: Any, request_id: str) -> Any:
        request = self.requests.get(request_id)
        if request is not None:
            for state in request.kv.groups:
                if len(state.pages) > state.first_page:
                    state.pages.pop()
        return original(self, request_id)

    return abort


def nothing_in_flight(original: Any) -> Any:
    return property(lambda self: False)


# ---- feeding -------------------------------------------------------------------------------------------


def feed_only_when_proposing(original: Any) -> Any:
    return property(lambda row: row.draft_end >= 0 and row.propose > 0)


def keep_unwritten_draft(original: Any) -> Any:
    def fed_from(self: KVFootprint, *, durable_end: int, accepted: int, proposed: int) -> int:
        return durable_end + accepted if self.keeps_accepted else durable_end

    return fed_from


def tap_rows_write(original: Any) -> Any:
    return property(lambda row: row.first_position)


def no_tap_rows(original: Any) -> Any:
    return lambda self, request: 0


def fork_shares_reach(original: Any) -> Any:
    def fork_groups(self: Any, parent: Any, child: Any, groups: Any, end: int) -> None:
        if groups is self.holdings.draft:
            end = child.draft_end = min(parent.committed, parent.draft_end)
        original(self, parent, child, groups, end)

    return fork_groups


def commit_every_row(original: Any) -> Any:
    def commit_kv(self: Any, request: Any, row: Any, v: int, **others: Any) -> None:
        original(self, request, row, row.end, **others)

    return commit_kv


# ---- loads ---------------------------------------------------------------------------------------------


def restore_at_once(original: Any) -> Any:
    def restore(self: Any, group: int, pages: list[int]) -> None:
        index = self.layout.arena_of[group]
        if self._observer:
            self._observer.restored(index, pages)
        self.arenas[index].restore(pages)
        self._release_now(index, pages)

    return restore


def settle_drafts_at_the_start(original: Any) -> Any:
    def settle_draft(self: Any, sequence: Any, end: int, **others: Any) -> None:
        reachable = min(end, self.layout.footprint.durable_end(end))
        sequence.draft_end = reachable
        for g, size in self.holdings.draft:
            self.holdings.cut(sequence, g, size, reachable)

    return settle_draft


def publish_each_arrival(original: Any) -> Any:
    def import_interval(self: Any, sequence: Any, load: Any) -> None:
        original(self, sequence, load)
        if load.key is None and load.group < self.layout.num_target:
            sequence.committed = load.interval.end
            self.progress.publish(sequence)
            sequence.committed = 0

    return import_interval
