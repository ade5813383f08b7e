"""Continuous batching under a token budget.

    add ─▶ waiting ─▶ [loading] ─▶ prefilling ─▶ decoding ─▶ finished (or held, on a prefill worker)
              ▲────────────── preempted ◀──────────┘

schedule() touches what runs and the head of what waits; nothing grows with the queue or with history.

With a step in flight, schedule() plans step n+1 from the most that step n can yield; commit(n) then says
what it did yield, and correct() moves the rows of n+1 to where they really start. A step that was interrupted
is given up with abandon() instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from outrider.errors import OutOfPages, RequestError
from outrider.kv.ledger import Load
from outrider.kv.manager import KVManager
from outrider.scheduler.config import LoadFailure, Role, SchedulerConfig
from outrider.scheduler.plan import ScheduledRequest, StepPlan, Update, Verdict
from outrider.scheduler.planner import Planner
from outrider.scheduler.request import Request, RequestSpec, State, check_remote, token_array
from outrider.scheduler.roster import Roster

QuarantinedPages = list[tuple[int, list[int]]]
"""(group, pages) that a transfer in flight may still write to: `KVManager.restore_quarantined` gives them back."""


class Abandoned(NamedTuple):
    """What giving up a step did."""

    ended: list[str]
    """Ids of the sequences that it ended."""
    quarantined: QuarantinedPages


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        config.check_against(kv.layout, kv.config)
        self.config = config
        self.kv = kv
        self.roster = Roster(kv, protect_after=config.protect_after_preemptions)
        self.planner = Planner(config, kv, self.roster)
        self._footprint = kv.layout.footprint
        self._settling: list[Request] = []
        """Requests whose loads have all arrived, but with a page copy that has yet to run."""
        self._new_loads: list[tuple[str, tuple[Load, ...]]] = []
        self._updates: list[Update] = []
        self._arrivals = 0
        self._next_step = 0
        self._moving = False
        """Whether requests and pages are being changed. Still set when a call begins, it means that the last call was
        interrupted half-way."""

    @property
    def requests(self) -> dict[str, Request]:
        return self.roster.requests

    @property
    def num_running(self) -> int:
        return self.roster.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.roster.waiting)

    @property
    def num_loading(self) -> int:
        return len(self.roster.loading)

    @property
    def num_preemptions(self) -> int:
        return self.roster.num_preemptions

    @property
    def num_stalls(self) -> int:
        return self.planner.num_stalls

    @property
    def has_work(self) -> bool:
        """Whether any request waits, loads or runs. Requests that are only held for a peer do not count."""
        return bool(self.num_running or self.num_waiting or self.num_loading)

    @property
    def only_loading(self) -> bool:
        """Whether nothing can be planned before a load ends."""
        return bool(self.num_loading) and not self.num_running and not self.num_waiting

    # ---- requests come and go ----------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> Request:
        """Queue a request and return its record, or refuse it with the reason."""
        limit = self.kv.config.max_model_len
        prompt_len = len(spec.prompt) - spec.prefilled_tokens
        if len(spec.prompt) >= limit:
            raise RequestError(
                f"request {spec.id!r}: the prompt has {len(spec.prompt)} tokens, but the model's limit is {limit} "
                "and one must be left to generate; shorten the prompt"
            )
        if spec.remote is not None:
            check_remote(spec, self.kv.layout)
        elif self.config.role is Role.DECODE:
            raise RequestError(
                f"request {spec.id!r} brings no KV from a prefill worker, and this worker only decodes; send it to a "
                "prefill worker first, or give this worker the role BOTH"
            )
        if spec.n > 1 and (self.config.role is Role.PREFILL or spec.remote is not None):
            raise RequestError(
                f"request {spec.id!r}: n = {spec.n} cannot be handed from a prefill to a decode worker; "
                "send n requests, the prompt is computed once"
            )
        if any(sequence_id in self.requests for sequence_id in spec.sequence_ids):
            raise RequestError(f"request id {spec.id!r} is in use; choose another")
        tokens = spec.prompt
        if not isinstance(tokens, array) or tokens.typecode != "I":
            tokens = token_array(tokens, f"request {spec.id!r}")
        self._repair()
        try:
            self._moving = True
            request = self._enter(spec, tokens, prompt_len)
        except RequestError:
            self._moving = False
            raise
        self._moving = False
        return request

    def _enter(self, spec: RequestSpec, tokens: array[int], prompt_len: int) -> Request:
        """Make the record of a sequence, which waits from now on."""
        # A prefill worker's part ends with the first token.
        wanted = 1 if self.config.role is Role.PREFILL else spec.max_tokens
        total = min(prompt_len + wanted, self.kv.config.max_model_len)
        k = 0 if self.config.role is Role.PREFILL else min(spec.k, total)
        sequence = self.kv.open(
            spec.sequence_ids[0],
            tokens,
            total_tokens=total,
            label=spec.id,
            k=k,
            adapter=spec.adapter,
            salt=spec.salt,
            media=spec.media,
        )
        request = Request(
            spec=spec,
            id=sequence.id,
            tokens=tokens,
            arrival=self._arrivals,
            kv=sequence,
            prompt_len=prompt_len,
            max_total=total,
            k=k,
            full_k_until=self.planner.full_k_until(k),
            may_draft=bool(self._footprint.groups) and self.kv.draft_fits(total, k),
        )
        self._arrivals += 1
        self.roster.enter(request)
        return request

    def abort(self, sequence_id: str) -> QuarantinedPages:
        """Forget a sequence, if there is one of this id."""
        self._repair()
        request = self.requests.get(sequence_id)
        if request is None:
            return []
        self._moving = True
        quarantined = self.roster.finish(request)
        self._moving = False
        return quarantined

    def release_held(self, sequence_id: str) -> None:
        """Let go of a held sequence: the decode worker has what it needs, or its lease ran out."""
        request = self.requests.get(sequence_id)
        if request is not None and request.state is State.HELD:
            self.roster.finish(request)

    # ---- planning ----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step from what is known now."""
        self._repair()
        self._moving = True
        step, planner = self._next_step, self.planner
        self._next_step += 1
        planner.begin(step)
        planner.serve_stalled()
        planner.plan_decodes()
        for request in self.roster.prefilling.snapshot():
            if request.state is State.PREFILLING:
                planner.plan_prefill(request)
        self._admit_waiting()
        plan = StepPlan(step=step, scheduled=planner.take_rows(), kv=self.kv.take_plan(step))
        self._moving = False
        return plan

    def _admit_waiting(self) -> None:
        """Admit waiting requests by rank, while no running request lacks pages."""
        roster, planner = self.roster, self.planner
        while not planner.short_of_pages and planner.rows_left > 0:
            if roster.num_running + len(roster.loading) >= self.config.max_num_seqs:
                return
            request = roster.waiting.peek()
            if request is None or request.flight or not self._admit(request):
                return
            if request.state is State.PREFILLING:
                planner.plan_prefill(request)

    def _admit(self, request: Request) -> bool:
        kv, spec = request.kv, request.spec
        remote = spec.remote if request.epoch == 0 else None
        try:
            admission = self.kv.admit(kv, use_cache=spec.use_cache, may_draft=request.may_draft, remote=remote)
        except OutOfPages:
            return False
        if self.num_running and not self.kv.has_room(kv, len(request.tokens)):
            # Better to wait than to start a prompt that would soon be preempted.
            self.kv.release(kv, keep_end=False)
            return False
        request.fresh = True
        if admission.loads:
            self.roster.load(request)
            self._new_loads.append((request.id, admission.loads))
        else:
            self.roster.prefill(request)
        return True

    # ---- loads -------------------------------------------------------------------------------------

    def take_loads(self) -> list[tuple[str, tuple[Load, ...]]]:
        """Returns the loads of requests admitted since the last call, for a connector to start."""
        loads, self._new_loads = self._new_loads, []
        return loads

    def load_arrived(self, sequence_id: str, load: Load) -> None:
        request = self.roster.loading.get(sequence_id)
        if request is not None:
            self.kv.import_interval(request.kv, load)
            self._maybe_start_loaded(request)

    def load_failed(self, sequence_id: str, load: Load) -> None:
        request = self.roster.loading.get(sequence_id)
        if request is not None:
            self.kv.fail_load(request.kv, load)
            self._maybe_start_loaded(request)

    def load_lost(self, sequence_id: str) -> QuarantinedPages:
        """Give up a transfer that never ended. Its pages are restored once its handle is destroyed."""
        request = self.roster.loading.get(sequence_id)
        if request is None:
            return []
        if not request.kv.pending_groups() - set(self.kv.layout.draft_groups):
            quarantined = self.kv.abandon_draft_loads(request.kv)
            self._maybe_start_loaded(request)
            return quarantined
        quarantined = self.kv.abandon_loading(request.kv)
        request.epoch += 1
        self.roster.wait_again(request)
        if self.config.load_failure is LoadFailure.FAIL:
            self._fail(request)
        return quarantined

    def _maybe_start_loaded(self, request: Request) -> None:
        kv = request.kv
        if kv.loading or request.state is not State.LOADING:
            return
        if not self.kv.may_finish_loading(kv):
            self._settling.append(request)
            return
        wanted = kv.load_end
        reached = self.kv.finish_loading(kv)
        request.epoch += 1
        if reached < wanted and self.config.load_failure is LoadFailure.FAIL:
            self.roster.hold(request)
            self._fail(request)
        elif reached < kv.hit:
            # What the index held was given up for the transfer; search again.
            self.kv.release(kv)
            self.roster.wait_again(request)
        else:
            self.roster.prefill(request)

    def _fail(self, request: Request) -> None:
        self._updates.append(Update(request.id, (), "failed"))
        self.roster.finish(request, keep_end=False)

    def take_updates(self) -> list[Update]:
        """Returns updates of requests that ended outside a step, such as those whose load failed."""
        updates, self._updates = self._updates, []
        return updates

    # ---- verdicts ----------------------------------------------------------------------------------

    def correct(self, plan: StepPlan) -> StepPlan:
        """Move the rows of a plan made ahead of a verdict to where they really start."""
        rows = []
        for row in plan.scheduled:
            request = self.requests.get(row.sequence_id)
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
        return StepPlan(step=plan.step, scheduled=tuple(rows), kv=plan.kv)

    def commit(self, plan: StepPlan, verdict: Verdict) -> list[Update]:
        """Take over what a step decided; every request advances to its own v."""
        self._moving = True
        self.kv.complete(plan.step)
        settling, self._settling = self._settling, []
        for loaded in settling:
            self._maybe_start_loaded(loaded)
        updates = self.take_updates()
        requests, commit_kv, new_update = self.requests, self._commit_kv, tuple.__new__
        for row, tokens, proposed in zip(plan.scheduled, verdict.tokens, verdict.proposed, strict=True):
            sequence_id, samples = row.sequence_id, row.samples
            request = requests.get(sequence_id)
            if request is None or not (flight := request.flight) or flight[0] is not row:
                continue  # aborted meanwhile
            del flight[0]
            if not samples:
                if row.epoch == request.epoch:
                    commit_kv(request, row, row.start + row.num_rows)
                continue
            known, finish = request.tokens, None
            if request.spec.stop_tokens or len(known) + len(tokens) >= request.max_total:
                tokens, finish = self._cut_at_end(request, tokens)
            known.extend(tokens)
            forks = verdict.fork_tokens.get(sequence_id, ()) if samples > 1 else ()
            if row.epoch == request.epoch:
                request.drafts = request.proposed = proposed
                if forks:
                    commit_kv(request, row, len(known) - 1, keep_window=True)
                else:
                    commit_kv(request, row, len(known) - 1)
            updates.append(new_update(Update, (sequence_id, tokens, finish)))
            if forks:
                updates += [self._fork(request, row, index, token) for index, token in enumerate(forks, start=1)]
            if finish is not None:
                self._end(request, finish)
        self._moving = False
        return updates

    def abandon(self, plan: StepPlan | None) -> Abandoned:
        """Give up the one step in flight, however far it got; None means that planning itself was interrupted.

        It is unknown what was written to the pages of its requests, so they end, and nothing more of them is
        published. Requests that were only given pages or copies in it are computed again. All others go on. If
        planning or committing was interrupted, the ledger itself is unknown: then every other request is
        computed again, and the cache is emptied.
        """
        if plan is None:
            self._moving = True
        if self._moving:
            return self._start_over(() if plan is None else [row.sequence_id for row in plan.scheduled])
        assert plan is not None
        pool, requests = self.kv.pool, self.requests
        assert plan.step == pool.next_step - 1 <= pool.last_completed + 1, "other steps are in flight too"
        if pool.step_in_flight:
            self.kv.complete(plan.step)
        self.kv.holdings.tell_again(plan.kv)
        with_rows = {row.sequence_id for row in plan.scheduled}
        with_pages = {change.sequence for change in plan.kv.assignments}
        given_up = Abandoned([], [])
        for request in [request for request in requests.values() if request.id in with_rows | with_pages]:
            if request.id in with_rows or request.state is State.LOADING:
                given_up.ended.append(request.id)
                given_up.quarantined.extend(self.roster.finish(request, keep_end=False))
            elif request.state is not State.WAITING:
                self.roster.preempt(request, keep_end=False)
        return given_up

    def _repair(self) -> None:
        """Start over if the last call was interrupted half-way: what each request holds is unknown then."""
        if self._moving:
            states = {request.id: request.state for request in self.requests.values()}
            # The others that end were being finished anyway: their callers have given them up.
            lost = [id for id in self._start_over().ended if states[id] in (State.LOADING, State.HELD)]
            self._updates += [Update(id, (), "failed") for id in lost]

    def _start_over(self, with_rows: Collection[str] = ()) -> Abandoned:
        """Take the KV from every request, and empty the cache. Requests with rows in a step, and those that load, end;
        all others are computed again."""
        self._moving = True
        quarantined: QuarantinedPages = []
        for request in self.roster.loading.values():
            quarantined += self.kv.holdings.set_pending_aside(request.kv)
        ended, kept = [], []
        for request in self.requests.values():
            stays = request.state in (State.WAITING, State.PREFILLING, State.DECODING)
            if stays and request.id not in with_rows and not request.flight and request.id in self.kv.sequences:
                kept.append(request)
            else:
                ended.append(request.id)
        self.kv.holdings.start_over(self.kv.sequences, {request.id for request in kept})
        self.roster.start_over(kept)
        self._settling, self._new_loads = [], []
        self._next_step = self.kv.pool.next_step
        self._moving = False
        return Abandoned(ended, quarantined)

    def _end(self, request: Request, finish: str) -> None:
        if finish == "prefilled":
            self.roster.hold(request)
        else:
            self.roster.finish(request)

    def _hands_over(self, request: Request) -> bool:
        """Whether only a prefill worker's part of the request ends here, and not the request."""
        whole = min(request.prompt_len + request.spec.max_tokens, self.kv.config.max_model_len)
        return self.config.role is Role.PREFILL and request.max_total < whole

    def _commit_kv(self, request: Request, row: ScheduledRequest, v: int, *, keep_window: bool = False) -> None:
        flight, fed_to = request.flight, row.feed_to
        if not flight and fed_to is None and not keep_window:
            self.kv.commit(request.kv, v)
            return
        ahead = flight[0].num_rows if flight else 0
        self.kv.commit(request.kv, v, fed_to=fed_to, ahead=ahead, keep_window=keep_window)
        if fed_to is not None:
            request.fresh = True

    def _cut_at_end(self, request: Request, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
        """Returns the tokens up to the first stop token or the length limit, and what ended them."""
        finish = None
        stop = request.spec.stop_tokens
        if stop:
            for place, token in enumerate(tokens):
                if token in stop:
                    tokens, finish = tokens[: place + 1], "stop"
                    break
        room = max(0, request.max_total - len(request.tokens))
        if len(tokens) >= room:
            if len(tokens) > room or finish is None:
                finish = "prefilled" if self._hands_over(request) else "length"
            tokens = tokens[:room]
        return tokens, finish

    def _fork(self, parent: Request, row: ScheduledRequest, index: int, token: int) -> Update:
        """Start another continuation of the same prompt; it shares the prompt's pages if there is room to."""
        tokens = parent.tokens[: parent.prompt_len]
        tokens.append(token)
        spec = replace(parent.spec, sequence_ids=parent.spec.sequence_ids[index : index + 1], prompt=tokens)
        child = self._enter(spec, tokens, parent.prompt_len)
        finish = "stop" if token in spec.stop_tokens else "length" if len(tokens) >= child.max_total else None
        if finish is not None:
            self.roster.finish(child)
        elif row.epoch == parent.epoch and self.num_running < self.config.max_num_seqs:
            try:
                self.kv.fork(parent.kv, child.kv)
            except OutOfPages:
                return Update(child.id, (token,), finish)
            self.roster.decode(child)
        return Update(child.id, (token,), finish)
