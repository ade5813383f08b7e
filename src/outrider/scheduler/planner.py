"""Planning the rows of one step: what each running request does, within the budget and the pages."""

from __future__ import annotations

from bisect import bisect_right

from outrider.errors import OutOfPages
from outrider.kv.footprint import KVFootprint
from outrider.kv.ledger import SequenceKV
from outrider.kv.manager import KVManager
from outrider.scheduler.config import SchedulerConfig
from outrider.scheduler.plan import ScheduledRequest
from outrider.scheduler.request import Request, State
from outrider.scheduler.roster import Roster


def drafts_within(footprint: KVFootprint, k: int, row_quota: int) -> int:
    """Returns the most drafts, at most k, that one decoding request can verify and propose again within its quota.

    A step of a request costs its own row, the drafts it verifies, and the rows that propose the next ones;
    all of them count.
    """
    while k > 0 and 1 + k + footprint.draft_rows(k) > row_quota:
        k -= 1
    return k


class StepBudget:
    """Rows left in a step, and the quota of each decoding request."""

    __slots__ = ("left", "row_quota")

    def __init__(self, rows: int, *, decoding: int, prompt_rows: int) -> None:
        """`prompt_rows` is the fewest rows with which a prompt, running or waiting, makes progress; 0 without any."""
        self.left = rows
        kept = max(prompt_rows, rows // 8) if prompt_rows else 0
        self.row_quota = max(1, (rows - kept) // decoding) if decoding else rows


class Planner:
    """Adds rows to the step that is being planned."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, roster: Roster) -> None:
        self.num_stalls = 0
        """How often rows could not be planned for want of pages."""
        self.short_of_pages = False
        """Whether a running request lacks pages in this step, so that no other is admitted."""
        self._config = config
        self._kv = kv
        self._roster = roster
        self._footprint = kv.layout.footprint
        self._step = -1
        self._rows: list[ScheduledRequest] = []
        self._budget = StepBudget(1, decoding=0, prompt_rows=0)
        self._full_k: dict[int, int] = {}
        self._ahead: list[int] = []
        """Per k: slots past v that the draft groups of an unlimited drafter reserve."""
        self._draft_rows: list[int] = []
        """Per k: rows that proposing takes."""

    def begin(self, step: int) -> None:
        """Start a new step with a full budget."""
        roster = self._roster
        prompts_wait = len(roster.prefilling) > 0 or roster.waiting.peek() is not None
        self._step = step
        self._rows = []
        self.short_of_pages = False
        self._budget = StepBudget(
            self._config.max_num_batched_tokens,
            decoding=len(roster.decoding),
            prompt_rows=1 + self._footprint.token_reach if prompts_wait else 0,
        )

    @property
    def rows_left(self) -> int:
        return self._budget.left

    def take_rows(self) -> tuple[ScheduledRequest, ...]:
        return tuple(self._rows)

    def full_k_until(self, k: int) -> int:
        """Returns the largest v from which all k drafts fit: fit() never grows with v."""
        if k in self._full_k:
            return self._full_k[k]
        while len(self._ahead) <= k:
            self._draft_rows.append(self._footprint.draft_rows(len(self._ahead)))
            self._ahead.append(self._footprint.reserve_end(v=0, k=len(self._ahead)))
        limit = self._kv.config.max_model_len

        def too_far(v: int) -> bool:
            return self._footprint.fit(k=k, v=v, max_model_len=limit, remaining_tokens=k + 1) < k

        self._full_k[k] = bisect_right(range(limit + 1), False, key=too_far) - 1
        return self._full_k[k]

    def plan_decodes(self) -> None:
        budget = self._budget
        footprint, ahead, draft_rows = self._footprint, self._ahead, self._draft_rows
        has_groups, rows, step, new_row = bool(footprint.groups), self._rows, self._step, tuple.__new__
        decoding, asked_k, affordable_k = State.DECODING, -1, 0
        for request in self._roster.decoding.snapshot():
            if request.state is not decoding:
                continue  # preempted a moment ago
            kv, flight = request.kv, request.flight
            known = len(request.tokens)
            start, drafts = kv.committed, request.drafts
            if flight:
                row = flight[-1]
                if request.fresh:
                    continue  # a drafter that catches up does so with the verdict known
                start += row.num_rows
                drafts = row.propose
                known += 1 + row.drafts
            remaining = request.max_total - known
            if remaining <= 0:
                continue  # the step in flight may be its last
            k = request.wanted
            if k != asked_k:
                # Mostly all requests ask for the same.
                asked_k, affordable_k = k, drafts_within(footprint, k, budget.row_quota)
            k = affordable_k
            # What was looked up, or proposed when fewer requests ran, may be more than is proposed now.
            if drafts > k and drafts > (most := max(k, budget.row_quota - 1 - draft_rows[k])):
                drafts = most
            if drafts >= remaining:
                drafts = remaining - 1
            count = 1 + drafts
            v = start + count
            remaining -= count
            if v > request.full_k_until or remaining <= k:
                k = footprint.fit(k=k, v=v, max_model_len=self._kv.config.max_model_len, remaining_tokens=remaining)
            if has_groups and not kv.drafting:
                k = 0
            cost = count + draft_rows[k]
            if request.fresh or cost > budget.left:
                self._plan_row(request, start=start, count=count, drafts=drafts, k=k, samples=1)
                continue
            # The common case: nothing to catch up with, and mostly nothing to reserve.
            if v > kv.target_room or v + ahead[k] > kv.draft_room:
                if not self._reserve(request, v, k):
                    continue
                if has_groups and not kv.drafting:
                    k, cost = 0, count
            row = new_row(
                ScheduledRequest,
                (
                    request.id,
                    request.epoch,
                    start,
                    count,
                    drafts,
                    0,
                    k,
                    1,
                    kv.draft_end if kv.drafting else -1,
                    request.proposed,
                    None,
                ),
            )
            rows.append(row)
            flight.append(row)
            request.planned_step = step
            budget.left -= cost

    def plan_prefill(self, request: Request) -> None:
        """Plan the next chunk of a prompt; the last chunk samples, and proposes."""
        kv, footprint, budget = request.kv, self._footprint, self._budget
        if request.flight and request.fresh:
            return
        start = kv.committed + sum(row.num_rows for row in request.flight)
        left = len(request.tokens) - start
        rows = budget.left - (self._tap_rows(request) if request.fresh else 0)
        count = min(left, rows, self._config.max_chunk_tokens)
        if count <= 0:
            return
        if count < left:
            self._plan_row(request, start=start, count=count, drafts=0, k=0, samples=0)
            return
        k = 0 if not kv.drafting and footprint.groups else request.wanted
        k = footprint.fit(
            k=drafts_within(footprint, k, budget.row_quota),
            v=start + count,
            max_model_len=self._kv.config.max_model_len,
            remaining_tokens=request.max_total - len(request.tokens) - 1,
        )
        while k > 0 and count + footprint.draft_rows(k) > rows:
            k -= 1
        forks = request.spec.n if request.generated == 0 else 1
        if self._plan_row(request, start=start, count=count, drafts=0, k=k, samples=forks):
            self._roster.decode(request)

    def _tap_rows(self, request: Request) -> int:
        """Returns the number of rows to run again so that a drafter which reaches ahead is fed up to the committed
        end."""
        kv, footprint = request.kv, self._footprint
        if not kv.drafting or footprint.rebuild:
            return 0
        return footprint.backlog(durable_end=kv.draft_end, v=kv.committed)

    def _plan_row(
        self,
        request: Request,
        *,
        start: int,
        count: int,
        drafts: int,
        k: int,
        samples: int,
    ) -> bool:
        """Reserve for one row and add it to the plan; False if pages are short."""
        kv, footprint, budget = request.kv, self._footprint, self._budget
        tap_rows, feed_to, catch_up_rows = 0, None, 0
        if request.fresh:
            tap_rows = self._tap_rows(request)
            if kv.drafting and footprint.rebuild:
                backlog = footprint.backlog(durable_end=kv.draft_end, v=start)
                # Half of the step at most: other requests must not wait for one request's drafter.
                most = max(1, self._config.max_num_batched_tokens // 2)
                catch_up_rows = min(backlog, most, max(0, budget.left - count))
                if backlog:
                    k = 0
                if catch_up_rows < backlog:
                    feed_to = kv.draft_end + catch_up_rows
        while k > 0 and count + tap_rows + footprint.draft_rows(k) > budget.left:
            k -= 1
        if count + tap_rows > budget.left:
            return False
        v = start + count
        if v > kv.target_room or self._draft_reserve_end(request, v, k) > kv.draft_room:
            if not self._reserve(request, v, k):
                return False
            if not kv.drafting and footprint.groups:
                k = tap_rows = catch_up_rows = 0
                feed_to = None
        row = ScheduledRequest(
            request.id,
            request.epoch,
            start,
            count,
            drafts,
            tap_rows,
            k,
            samples,
            kv.draft_end if kv.drafting else -1,
            request.proposed,
            feed_to,
        )
        self._rows.append(row)
        request.flight.append(row)
        request.fresh = feed_to is not None
        request.stalled = False
        request.planned_step = self._step
        budget.left -= count + tap_rows + catch_up_rows + footprint.draft_rows(k)
        return True

    def _draft_reserve_end(self, request: Request, v: int, k: int) -> int:
        """Returns where the draft groups' reservation ends: it is tied to the step that writes, from the first on."""
        return self._footprint.reserve_end(v=v, k=k)

    def _reserve(self, request: Request, v: int, k: int) -> bool:
        """Reserve pages, taking some from lower-ranked requests if need be; False if pages are short."""
        while True:
            try:
                self._kv.reserve(request.kv, v, self._draft_reserve_end(request, v, k))
                request.stalled = False
                return True
            except OutOfPages as shortage:
                if not self._make_room(request, shortage.arena):
                    request.stalled = True
                    self.num_stalls += 1
                    self.short_of_pages = True
                    return False

    # ---- when pages run out ------------------------------------------------------------------------

    def _make_room(self, request: Request, arena: int) -> bool:
        """Take pages from the requests that rank last. True if trying again now may help.

        Draft groups go first, those of requests behind this one and then its own: losing them costs speed,
        losing target KV costs a recomputation.
        """
        in_flight = self._kv.pool.step_in_flight
        if not request.stalled and any(index == arena for index, _page in self._kv.pool.pending()):
            return False  # pages are about to come free: wait one step before taking any
        for other in self._roster.running_from_last():
            if other.rank < request.rank:
                break
            if self._drafts_in(other.kv, arena) and other.planned_step != self._step:
                self._kv.drop_draft(other.kv)
                # With a step in flight the pages come free only when it completes.
                return not in_flight
        victim = self._victim(request)
        if victim is None:
            return False
        self._roster.preempt(victim)
        self.short_of_pages = True
        return not in_flight

    def _drafts_in(self, sequence: SequenceKV, arena: int) -> bool:
        layout = self._kv.layout
        return sequence.drafting and any(layout.arena_of[g] == arena for g in layout.draft_groups)

    def _victim(self, request: Request) -> Request | None:
        """Returns the last-ranked request behind this one, unless this step already has rows of it."""
        victim = self._roster.last_running()
        if victim is None or victim.rank <= request.rank or victim.planned_step == self._step:
            return None
        return victim

    def serve_stalled(self) -> None:
        """Reserve for prompts that found too few pages in the last step, before this step has rows of any request."""
        for request in self._roster.prefilling.snapshot():
            if request.stalled and request.state is State.PREFILLING and not request.flight:
                left = len(request.tokens) - request.kv.committed
                count = min(left, self._config.max_chunk_tokens, self._config.max_num_batched_tokens)
                request.stalled = False
                self._reserve(request, request.kv.committed + count, 0)
