"""Continuous batching under a token budget.

    add ─▶ waiting ─▶ [loading] ─▶ prefilling ─▶ decoding ─▶ finished (or held, on a prefill worker)
              ▲────────────── preempted ◀──────────┘

schedule() touches what runs and the head of what waits; nothing grows with the queue or with history.

With a step in flight, schedule() plans step n+1 from the most that step n can yield; commit(n) then says
what it did yield, and correct() moves the rows of n+1 to where they really start.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import replace

from outrider.errors import OutOfPages, RequestError
from outrider.kv.ledger import Load, SequenceKV
from outrider.kv.manager import KVManager
from outrider.scheduler.budget import StepBudget, drafts_for_share
from outrider.scheduler.config import LoadFailure, Role, SchedulerConfig
from outrider.scheduler.plan import StepPlan, StepRow, Update, Verdict
from outrider.scheduler.queue import RunningList, WaitingQueue
from outrider.scheduler.request import Request, RequestSpec, State, token_array


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config = config
        self.kv = kv
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_stalls = 0
        """Rows that could not be planned for want of pages."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._footprint = kv.layout.footprint
        self._waiting = WaitingQueue()
        self._prefilling = RunningList()
        self._decoding = RunningList()
        self._loading: dict[str, Request] = {}
        self._settling: list[Request] = []
        """Everything has arrived, but a page copy has yet to run."""
        self._new_loads: list[tuple[str, tuple[Load, ...]]] = []
        self._arrivals = 0
        self._next_step = 0
        self._rows: list[StepRow] = []
        self._full_k: dict[int, int] = {}
        self._ahead: list[int] = []
        """Per k: slots past v that the draft groups of an unlimited drafter reserve."""
        self._draft_rows: list[int] = []
        self._short_of_pages = False
        self._updates: list[Update] = []

    # ---- requests come and go ----------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> None:
        """Queue a request, or refuse it with the reason."""
        limit = self.kv.config.max_model_len
        prompt_len = len(spec.prompt) - spec.prefilled_tokens
        if len(spec.prompt) >= limit:
            raise RequestError(
                f"request {spec.id!r}: the prompt has {len(spec.prompt)} tokens, but the model's limit is {limit} "
                "and one must be left to generate; shorten the prompt"
            )
        if spec.remote is not None and not set(spec.remote).issuperset(self.kv.layout.target_groups):
            raise RequestError(
                f"request {spec.id!r}: the peer does not hold every target group; prefill it here"
            )
        if spec.n > 1 and (self.config.role is Role.PREFILL or spec.remote is not None):
            raise RequestError(
                f"request {spec.id!r}: n = {spec.n} cannot be handed from a prefill to a decode worker; "
                "send n requests, the prompt is computed once"
            )
        tokens = token_array(spec.prompt, f"request {spec.id!r}")
        self._enter(spec, tokens, prompt_len, self._arrivals)
        self._arrivals += 1

    def _enter(self, spec: RequestSpec, tokens: array[int], prompt_len: int, arrival: int) -> Request:
        # A prefill worker's part ends with the first token.
        wanted = 1 if self.config.role is Role.PREFILL else spec.max_tokens
        total = min(prompt_len + wanted, self.kv.config.max_model_len)
        k = 0 if self.config.role is Role.PREFILL else spec.k
        sequence = self.kv.open(
            spec.id, tokens, total_tokens=total, k=k, adapter=spec.adapter, salt=spec.salt, media=spec.media
        )
        request = Request(
            spec=spec,
            tokens=tokens,
            arrival=arrival,
            kv=sequence,
            prompt_len=prompt_len,
            max_total=total,
            k=k,
            full_k_until=self._full_k_until(k),
            may_draft=bool(self._footprint.groups) and self.kv.draft_fits(total, k),
        )
        self.requests[spec.id] = request
        self._waiting.push(request)
        return request

    def _full_k_until(self, k: int) -> int:
        """The largest v from which all k drafts fit: fit() never grows with v."""
        if k in self._full_k:
            return self._full_k[k]
        while len(self._ahead) <= k:
            self._draft_rows.append(self._footprint.draft_rows(len(self._ahead)))
            self._ahead.append(self._footprint.reserve_end(v=0, k=len(self._ahead)))
        limit = self.kv.config.max_model_len

        def too_far(v: int) -> bool:
            return self._footprint.fit(k=k, v=v, max_model_len=limit, remaining_tokens=k + 1) < k

        self._full_k[k] = bisect_right(range(limit + 1), False, key=too_far) - 1
        return self._full_k[k]

    def abort(self, request_id: str) -> list[tuple[int, list[int]]]:
        """Forget a request. Returns pages that a transfer in flight may still write to (see abandon_load)."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        return self._finish(request, "aborted")

    def _finish(self, request: Request, reason: str) -> list[tuple[int, list[int]]]:
        aside = self.kv.abandon_loading(request.kv) if request.state is State.LOADING else []
        self._leave_lists(request)
        request.state = State.FINISHED
        request.finish = reason
        self.kv.close(request.kv)
        del self.requests[request.id]
        return aside

    def _leave_lists(self, request: Request) -> None:
        if request.state is State.WAITING:
            request.state = State.FINISHED
            self._waiting.forget(request)
        elif request.state is State.LOADING:
            del self._loading[request.id]
        elif request.state is State.PREFILLING:
            self._prefilling.remove(request)
        elif request.state is State.DECODING:
            self._decoding.remove(request)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def has_work(self) -> bool:
        """Is anybody waiting, loading or running? Requests that are only held for a peer do not count."""
        return bool(self.num_running or len(self._waiting) or self._loading)

    @property
    def only_loading(self) -> bool:
        """Nothing can be planned before a load ends."""
        return bool(self._loading) and not self.num_running and not len(self._waiting)

    # ---- planning ----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step from what is known now."""
        self._rows = []
        self._short_of_pages = False
        prompts_wait = len(self._prefilling) > 0 or self._waiting.peek() is not None
        budget = StepBudget(
            self.config.max_num_batched_tokens,
            decoding=len(self._decoding),
            prompt_rows=1 + self._footprint.token_reach if prompts_wait else 0,
        )
        self._serve_stalled()
        self._plan_decodes(budget)
        for request in self._prefilling.snapshot():
            if budget.left <= 0:
                break
            if request.state is State.PREFILLING:
                self._plan_prefill(request, budget)
        self._admit_waiting(budget)
        step = self._next_step
        self._next_step += 1
        return StepPlan(step=step, rows=tuple(self._rows), kv=self.kv.take_plan(step))

    def _plan_decodes(self, budget: StepBudget) -> None:
        footprint, ahead, draft_rows = self._footprint, self._ahead, self._draft_rows
        has_groups, rows, step, new_row = bool(footprint.groups), self._rows, self._next_step, tuple.__new__
        share_k: dict[int, int] = {}
        for request in self._decoding.snapshot():
            if request.state is not State.DECODING:
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
            k = share_k.get(request.k)
            if k is None:
                k = share_k[request.k] = drafts_for_share(footprint, request.k, budget.share_rows)
            drafts = min(drafts, k, remaining - 1)
            v = start + 1 + drafts
            remaining -= 1 + drafts
            if v > request.full_k_until or remaining <= k:
                k = footprint.fit(
                    k=k, v=v, max_model_len=self.kv.config.max_model_len, remaining_tokens=remaining
                )
            if not kv.drafting and has_groups:
                k = 0
            if (
                request.fresh
                or v > kv.target_room
                or v + ahead[k] > kv.draft_room
                or 1 + drafts + draft_rows[k] > budget.left
            ):
                self._plan_row(request, budget, start=start, count=1 + drafts, drafts=drafts, k=k, samples=1)
                continue
            # The common case: nothing to reserve, nothing to catch up with.
            row = new_row(
                StepRow,
                (
                    request.spec.id,
                    request.epoch,
                    start,
                    1 + drafts,
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
            budget.left -= 1 + drafts + draft_rows[k]

    def _plan_prefill(self, request: Request, budget: StepBudget) -> None:
        """The next chunk of a prompt; the last chunk samples, and proposes."""
        kv, footprint = request.kv, self._footprint
        if request.flight and request.fresh:
            return
        start = kv.committed + sum(row.num_rows for row in request.flight)
        left = len(request.tokens) - start
        rows = budget.left - (self._tap_rows(request) if request.fresh else 0)
        count = min(left, rows, self.config.max_chunk_tokens)
        if count <= 0:
            return
        if count < left:
            self._plan_row(request, budget, start=start, count=count, drafts=0, k=0, samples=0)
            return
        k = 0 if not kv.drafting and footprint.groups else request.k
        k = footprint.fit(
            k=drafts_for_share(footprint, k, budget.share_rows),
            v=start + count,
            max_model_len=self.kv.config.max_model_len,
            remaining_tokens=request.max_total - len(request.tokens) - 1,
        )
        while k > 0 and count + footprint.draft_rows(k) > rows:
            k -= 1
        forks = request.spec.n if request.generated == 0 else 1
        if self._plan_row(request, budget, start=start, count=count, drafts=0, k=k, samples=forks):
            self._prefilling.remove(request)
            request.state = State.DECODING
            self._decoding.add(request)

    def _tap_rows(self, request: Request) -> int:
        """Rows to run again so that a drafter which reaches ahead is fed up to the committed end."""
        kv, footprint = request.kv, self._footprint
        if not kv.drafting or footprint.rebuild:
            return 0
        return footprint.backlog(durable_end=kv.draft_end, v=kv.committed)

    def _plan_row(
        self,
        request: Request,
        budget: StepBudget,
        *,
        start: int,
        count: int,
        drafts: int,
        k: int,
        samples: int,
    ) -> bool:
        """Reserve for one row and add it to the plan; False if pages are short."""
        kv, footprint = request.kv, self._footprint
        tap_rows, feed_to, catch_up_rows = 0, None, 0
        if request.fresh:
            tap_rows = self._tap_rows(request)
            if kv.drafting and footprint.rebuild:
                backlog = footprint.backlog(durable_end=kv.draft_end, v=start)
                catch_up_rows = min(backlog, max(0, budget.left - count))
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
        row = StepRow(
            request.spec.id,
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
        request.planned_step = self._next_step
        budget.left -= count + tap_rows + catch_up_rows + footprint.draft_rows(k)
        return True

    def _draft_reserve_end(self, request: Request, v: int, k: int) -> int:
        """Where the draft groups' reservation ends: tied to the step that writes, from the first one on."""
        return self._footprint.reserve_end(v=v, k=k)

    def _reserve(self, request: Request, v: int, k: int) -> bool:
        while True:
            try:
                self.kv.reserve(request.kv, v, self._draft_reserve_end(request, v, k))
                return True
            except OutOfPages as shortage:
                if not self._make_room(request, shortage.arena):
                    request.stalled = True
                    self.num_stalls += 1
                    self._short_of_pages = True
                    return False

    # ---- when pages run out ------------------------------------------------------------------------

    def _make_room(self, request: Request, arena: int) -> bool:
        """Take pages from whoever ranks last. True if trying again now may help.

        Draft groups go first: losing them costs speed, losing target KV costs a recomputation.
        """
        victim = self._victim(request)
        if victim is not None:
            if self._drafts_in(victim.kv, arena):
                self.kv.drop_draft(victim.kv)
            else:
                self._preempt(victim)
            # With a step in flight the pages come free only when it completes.
            return not self.kv.pool.step_in_flight
        if self._drafts_in(request.kv, arena) and not self.kv.pool.step_in_flight:
            self.kv.drop_draft(request.kv)
            return True
        return False

    def _drafts_in(self, sequence: SequenceKV, arena: int) -> bool:
        layout = self.kv.layout
        return sequence.drafting and any(layout.arena_of[g] == arena for g in layout.draft_groups)

    def _victim(self, request: Request) -> Request | None:
        """The last-ranked request behind this one, unless this step already counts on it."""
        candidates = [c for c in (self._decoding.last(), self._prefilling.last()) if c is not None]
        victim = max(candidates, key=lambda c: c.rank, default=None)
        if victim is None or victim.rank <= request.rank or victim.planned_step == self._next_step:
            return None
        return victim

    def _preempt(self, victim: Request) -> None:
        """Recompute it later. After a few times it is protected: it then goes before all unprotected ones."""
        self._leave_lists(victim)
        self.kv.release(victim.kv)
        victim.epoch += 1
        victim.preemptions += 1
        victim.drafts = victim.proposed = 0
        victim.fresh, victim.stalled = True, False
        victim.protected = victim.preemptions >= self.config.protect_after_preemptions
        victim.state = State.WAITING
        self._waiting.push(victim)
        self._short_of_pages = True
        self.num_preemptions += 1

    def _serve_stalled(self) -> None:
        """A prompt that found no pages last time asks first, before this step counts on anybody."""
        for request in self._prefilling.snapshot():
            if request.stalled and request.state is State.PREFILLING and not request.flight:
                left = len(request.tokens) - request.kv.committed
                count = min(left, self.config.max_chunk_tokens, self.config.max_num_batched_tokens)
                request.stalled = False
                self._reserve(request, request.kv.committed + count, 0)

    # ---- admission ---------------------------------------------------------------------------------

    def _admit_waiting(self, budget: StepBudget) -> None:
        """Take in waiting requests by rank, while nobody who runs lacks pages."""
        while not self._short_of_pages and budget.left > 0:
            if self.num_running + len(self._loading) >= self.config.max_num_seqs:
                return
            request = self._waiting.peek()
            if request is None or request.flight or not self._admit(request):
                return
            if request.state is State.PREFILLING:
                self._plan_prefill(request, budget)

    def _admit(self, request: Request) -> bool:
        kv, spec = request.kv, request.spec
        remote = spec.remote if request.epoch == 0 else None
        try:
            admission = self.kv.admit(
                kv, use_cache=spec.use_cache, may_draft=request.may_draft, remote=remote
            )
        except OutOfPages:
            return False
        if self.num_running and not self.kv.has_room(kv, len(request.tokens)):
            # Better to wait than to start a prompt that would soon be preempted.
            self.kv.release(kv)
            return False
        self._waiting.pop()
        request.fresh = True
        if admission.loads:
            request.state = State.LOADING
            self._loading[request.id] = request
            self._new_loads.append((request.id, admission.loads))
        else:
            self._start(request)
        return True

    def _start(self, request: Request) -> None:
        request.state = State.PREFILLING
        self._prefilling.add(request)

    # ---- loads -------------------------------------------------------------------------------------

    def take_loads(self) -> list[tuple[str, tuple[Load, ...]]]:
        """Loads of requests admitted since the last call, for a connector to start."""
        loads, self._new_loads = self._new_loads, []
        return loads

    def load_arrived(self, request_id: str, load: Load) -> None:
        request = self._loading.get(request_id)
        if request is not None:
            self.kv.import_interval(request.kv, load)
            self._maybe_start_loaded(request)

    def load_failed(self, request_id: str, load: Load) -> None:
        request = self._loading.get(request_id)
        if request is not None:
            self.kv.fail_load(request.kv, load)
            self._maybe_start_loaded(request)

    def load_lost(self, request_id: str) -> list[tuple[int, list[int]]]:
        """A transfer that never ended. Returns pages to restore once its handle is destroyed."""
        request = self._loading.pop(request_id, None)
        if request is None:
            return []
        aside = self.kv.abandon_loading(request.kv)
        request.epoch += 1
        if self.config.load_failure is LoadFailure.FAIL:
            self._fail(request)
        else:
            request.state = State.WAITING
            self._waiting.push(request)
        return aside

    def _maybe_start_loaded(self, request: Request) -> None:
        kv = request.kv
        if kv.loading or request.state is not State.LOADING:
            return
        if not self.kv.may_finish_loading(kv):
            self._settling.append(request)
            return
        wanted = kv.load_end
        del self._loading[request.id]
        reached = self.kv.finish_loading(kv)
        request.epoch += 1
        if reached < wanted and self.config.load_failure is LoadFailure.FAIL:
            self._fail(request)
        elif reached < kv.hit:
            # What the index held was given up for the transfer; look again.
            self.kv.release(kv)
            request.state = State.WAITING
            self._waiting.push(request)
        else:
            self._start(request)

    def take_updates(self) -> list[Update]:
        """Requests that ended outside a step, such as those whose load failed."""
        updates, self._updates = self._updates, []
        return updates

    def _fail(self, request: Request) -> None:
        self._updates.append(Update(request.id, (), "failed"))
        request.state = State.HELD
        self._finish(request, "failed")

    def release_held(self, request_id: str) -> None:
        """The decode side has what it needs, or its lease ran out."""
        request = self.requests.get(request_id)
        if request is not None and request.state is State.HELD:
            self._finish(request, "released")

    # ---- verdicts ----------------------------------------------------------------------------------

    def correct(self, plan: StepPlan) -> StepPlan:
        """Move the rows of a plan made ahead of a verdict to where they really start."""
        rows = []
        for row in plan.rows:
            request = self.requests.get(row.request)
            if request is None or request.epoch != row.epoch or row not in request.flight:
                continue
            kv = request.kv
            drafts = min(row.drafts, request.drafts) if row.drafts else 0
            right = row._replace(
                start=kv.committed,
                num_rows=row.num_rows - row.drafts + drafts,
                drafts=drafts,
                draft_end=kv.draft_end if kv.drafting else -1,
                proposed=request.proposed,
                propose=row.propose if kv.drafting or not self._footprint.groups else 0,
            )
            request.flight[request.flight.index(row)] = right
            rows.append(right)
        return StepPlan(step=plan.step, rows=tuple(rows), kv=plan.kv)

    def commit(self, plan: StepPlan, verdict: Verdict) -> list[Update]:
        """Take over what a step decided; every request advances to its own v."""
        self.kv.complete(plan.step)
        settling, self._settling = self._settling, []
        for loaded in settling:
            self._maybe_start_loaded(loaded)
        updates = self.take_updates()
        for row, tokens, proposed in zip(plan.rows, verdict.tokens, verdict.proposed, strict=True):
            request = self.requests.get(row.request)
            if request is None or not request.flight or request.flight[0] is not row:
                continue  # gone meanwhile
            del request.flight[0]
            if not row.samples:
                if row.epoch == request.epoch:
                    self._commit_kv(request, row, row.start + row.num_rows)
                continue
            kept, finish = self._append(request, tokens)
            if finish == "length" and self._hands_over(request):
                finish = "prefilled"
            if row.drafts:
                self.num_drafts += 1
                self.num_draft_tokens += row.drafts
                self.num_accepted_tokens += len(tokens) - 1
            forks = verdict.fork_tokens.get(row.request, ())
            if row.epoch == request.epoch:
                request.drafts = request.proposed = proposed
                self._commit_kv(request, row, len(request.tokens) - 1, keep_window=bool(forks))
            updates.append(Update(request.id, kept, finish))
            for number, token in enumerate(forks, start=1):
                updates.append(self._fork(request, row, number, token))
            if finish == "prefilled":
                self._leave_lists(request)
                request.state = State.HELD
            elif finish is not None:
                self._finish(request, finish)
        return updates

    def _hands_over(self, request: Request) -> bool:
        """Is this the end of a prefill worker's part, and not of the request?"""
        whole = min(request.prompt_len + request.spec.max_tokens, self.kv.config.max_model_len)
        return self.config.role is Role.PREFILL and request.max_total < whole

    def _commit_kv(self, request: Request, row: StepRow, v: int, *, keep_window: bool = False) -> None:
        kv, flight = request.kv, request.flight
        fed_to = row.feed_to
        self.kv.commit(
            kv, v, fed_to=fed_to, ahead=flight[0].num_rows if flight else 0, keep_window=keep_window
        )
        if fed_to is not None:
            request.fresh = True

    def _append(self, request: Request, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
        """Add tokens up to the first stop token or the length limit."""
        finish = None
        stop = request.spec.stop_tokens
        if stop:
            for place, token in enumerate(tokens):
                if token in stop:
                    tokens, finish = tokens[: place + 1], "stop"
                    break
        room = request.max_total - len(request.tokens)
        if len(tokens) >= room:
            if len(tokens) > room or finish is None:
                finish = "length"
            tokens = tokens[:room]
        request.tokens.extend(tokens)
        return tokens, finish

    def _fork(self, parent: Request, row: StepRow, number: int, token: int) -> Update:
        """A further continuation of the same prompt; it shares the prompt's pages if there is room to."""
        tokens = parent.tokens[: parent.prompt_len]
        tokens.append(token)
        spec = replace(parent.spec, id=f"{parent.spec.id}#{number}", n=1, prompt=tokens[:-1])
        child = self._enter(spec, tokens, parent.prompt_len, self._arrivals)
        self._arrivals += 1
        finish = "stop" if token in spec.stop_tokens else "length" if len(tokens) >= child.max_total else None
        if finish is not None:
            self._finish(child, finish)
        elif row.epoch == parent.epoch and self.num_running < self.config.max_num_seqs:
            try:
                self.kv.fork(parent.kv, child.kv)
            except OutOfPages:
                return Update(child.id, (token,), finish)
            child.state = State.DECODING
            self._waiting.forget(child)
            self._decoding.add(child)
        return Update(child.id, (token,), finish)
