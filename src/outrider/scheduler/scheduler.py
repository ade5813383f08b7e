"""Continuous batching under a token budget.

    add ─▶ [fetching] ─▶ waiting ─▶ [loading] ─▶ prefilling ─▶ decoding ─▶ finished (or held for a decode worker)
                            ▲────────────── preempted ◀──────────┘

schedule() touches what runs and the head of what waits; nothing grows with the queue or with history.

With a step in flight, schedule() plans step n+1 from the most that step n can yield; commit(n) then says
what it did yield, and correct() moves the rows of n+1 to where they really start. A step that was interrupted
is given up with abandon() instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from outrider.errors import OutOfPages, RequestError
from outrider.kv.intervals import Interval
from outrider.kv.ledger import Load
from outrider.kv.manager import KVManager
from outrider.kv.prefix import Tier
from outrider.scheduler.config import LoadFailure, Role, SchedulerConfig
from outrider.scheduler.incoming import IncomingKV
from outrider.scheduler.pacing.pacer import Pace, Pacer
from outrider.scheduler.pacing.worth import Source
from outrider.scheduler.plan import ScheduledRequest, StepPlan, Update, Verdict
from outrider.scheduler.planner import Planner
from outrider.scheduler.request import Request, RequestSpec, State, token_array
from outrider.scheduler.roster import GivenUp, Roster


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv: KVManager, *, pacer: Pacer | None = None) -> None:
        """`pacer` chooses how much is drafted and verified at each step; without one, all requests get k drafts."""
        config.check_against(kv.layout, kv.config)
        self.config = config
        self.kv = kv
        self.pacer = pacer
        self.roster = Roster(kv, protect_after=config.protect_after_preemptions)
        self.planner = Planner(config, kv, self.roster)
        self.incoming = IncomingKV(config, kv, self.roster)
        self._footprint = kv.layout.footprint
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
        """Whether any request is fetched, waits, loads or runs. Requests that are only held for a peer do not count."""
        return bool(self.num_running or self.num_waiting or self.num_loading or self.roster.fetching)

    @property
    def only_loading(self) -> bool:
        """Whether nothing can be planned before a peer answers or a load ends."""
        return self.has_work and not self.num_running and not self.num_waiting

    def clear_counts(self) -> None:
        """Counts preemptions, stalls and hits from zero."""
        self.roster.num_preemptions = self.planner.num_stalls = 0
        self.kv.clear_counts()

    @contextmanager
    def _move(self) -> Iterator[None]:
        """Change requests and pages. An interruption leaves `_moving` set, so that the next call starts over."""
        self._repair()
        self._moving = True
        yield
        self._moving = False

    # ---- requests come and go ----------------------------------------------------------------------

    def add(self, spec: RequestSpec) -> Request:
        """Queue a request and return its record, or refuse it with the reason."""
        limit = self.kv.config.max_model_len
        if len(spec.prompt) >= limit:
            raise RequestError(
                f"request {spec.id!r}: the prompt has {len(spec.prompt)} tokens, but the model's limit is {limit} "
                "and one must be left to generate; shorten the prompt"
            )
        decodes_only = self.config.role is Role.DECODE and self.config.load_failure is LoadFailure.FAIL
        if decodes_only and not spec.awaits_peer and not spec.compute_prompt:
            raise RequestError(
                f"request {spec.id!r} brings no KV from a prefill worker, and this worker computes no prompts; send it "
                "to a prefill worker first, or let this worker compute it (kv_load_failure_policy recompute)"
            )
        if spec.awaits_peer and self.config.role is Role.PREFILL:
            raise RequestError(
                f"request {spec.id!r} is to start from another worker's KV, but this worker only computes prompts; "
                "send it to a decode worker"
            )
        if spec.hand_over and (self.config.role is Role.DECODE or self.kv.config.keep_margin < self.kv.layout.margin):
            raise RequestError(
                f"request {spec.id!r} is to be handed to a decode worker, but this worker hands nothing over; send it "
                "to a prefill worker"
            )
        if spec.hand_over and spec.n > 1:
            raise RequestError(
                f"request {spec.id!r}: a prompt is handed over with one token, not with n = {spec.n} continuations; "
                "ask the decode worker for them"
            )
        if any(sequence_id in self.requests for sequence_id in spec.sequence_ids):
            raise RequestError(f"request id {spec.id!r} is in use; choose another")
        tokens = spec.prompt
        if not isinstance(tokens, array) or tokens.typecode != "I":
            tokens = token_array(tokens, f"request {spec.id!r}")
        self._repair()
        try:
            self._moving = True
            request = self._enter(spec, tokens, len(tokens))
        except RequestError:
            self._moving = False
            raise
        self._moving = False
        return request

    def _enter(self, spec: RequestSpec, tokens: array[int], prompt_len: int) -> Request:
        """Make the record of a sequence, which waits from now on, or is fetched."""
        # How much a decode worker will write is not known here; drafts are proposed as if it were enough.
        wanted = 2 + spec.k if spec.hand_over else spec.max_tokens
        total = min(prompt_len + wanted, self.kv.config.max_model_len)
        k = min(spec.k, total)
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
            wanted=k,
            # How far a decode worker goes with the drafts of a handed-over request is not known here.
            pace=None if self.pacer is None or spec.fixed_k or spec.hand_over or not k else self.pacer.enter(),
            state=State.FETCHING if spec.awaits_peer or spec.awaits_tiers else State.WAITING,
        )
        self._arrivals += 1
        if request.pace is not None and self.pacer is not None:
            request.wanted = min(k, self.pacer.newcomers_k)
        self.roster.enter(request)
        return request

    def fetched(
        self, sequence_id: str, remote: Mapping[int, Interval], first_token: int | None, *, drafts: int = 0
    ) -> None:
        """Note what a prefill worker holds of this request's prompt, per group, and the token that it sampled, with the
        number of drafts that come after it.

        Without that token the request samples its first token itself, from the last row of the prompt.
        """
        assert set(remote).issuperset(self.kv.layout.target_groups), "a peer that lacks a target group offers nothing"
        with self._move():
            self.incoming.fetched(sequence_id, remote, first_token, drafts=drafts)

    def not_fetched(self, sequence_id: str) -> None:
        """Note that no prefill worker holds this request's prompt, or that it cannot wait for it any longer: it is
        computed here, or fails."""
        with self._move():
            self.incoming.not_fetched(sequence_id)

    def looked_up(self, sequence_id: str, found: Tier | None) -> None:
        """Note what tiers hold of the prompt of a request that waits for their answer; None if they did not answer."""
        with self._move():
            self.incoming.looked_up(sequence_id, found)

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence, if there is one of this id."""
        with self._move():
            request = self.requests.get(sequence_id)
            if request is not None:
                self.roster.give_up(request)

    def take_given_up(self) -> list[GivenUp]:
        """Returns the sequences that were given up since the last call. The transfer driver must ask before the next
        step runs: from then on, their pages may be written to."""
        given_up, self.roster.given_up = self.roster.given_up, []
        return given_up

    def release_held(self, sequence_id: str) -> None:
        """Let go of a held sequence: the decode worker has what it needs, or its lease ran out."""
        with self._move():
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
        pace = None if self.pacer is None else self._set_pace(self.pacer)
        planner.plan_decodes()
        for request in self.roster.prefilling.snapshot():
            if request.state is State.PREFILLING:
                planner.plan_prefill(request)
        self._admit_waiting()
        plan = StepPlan(step=step, scheduled=planner.take_rows(), kv=self.kv.take_plan(step), pace=pace)
        self._moving = False
        return plan

    def _set_pace(self, pacer: Pacer) -> Pace:
        """Has the pacer choose for every request that may have rows in this step."""
        prefilling = self.roster.prefilling.snapshot()
        left = sum(len(request.tokens) - request.kv.committed for request in prefilling)
        pace = pacer.begin(self.roster.decoding.snapshot(), prompt_rows=min(left, self.config.max_num_batched_tokens))
        for request in prefilling:
            if request.pace is not None:
                request.wanted = min(request.k, pacer.newcomers_k)
        return pace

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
        remote = request.remote if request.epoch == 0 else None
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
            self.incoming.await_loads(request, admission.loads)
        else:
            self.incoming.start(request)
        return True

    # ---- loads -------------------------------------------------------------------------------------

    def take_loads(self) -> list[tuple[str, tuple[Load, ...]]]:
        """Returns the loads of requests admitted since the last call, for the transfer driver to start."""
        loads, self.incoming.new_loads = self.incoming.new_loads, []
        return loads

    def load_arrived(self, sequence_id: str, load: Load) -> None:
        with self._move():
            self.incoming.arrived(sequence_id, load)

    def load_failed(self, sequence_id: str, load: Load) -> None:
        with self._move():
            self.incoming.failed(sequence_id, load)

    def load_lost(self, sequence_id: str) -> None:
        """Give up a transfer that never ended. `take_given_up` names its pages, to be restored once nothing can land in
        them any more."""
        with self._move():
            self.incoming.lost(sequence_id)

    def take_updates(self) -> list[Update]:
        """Returns updates of requests that ended outside a step, such as those whose load failed."""
        updates, self.incoming.updates = self.incoming.updates, []
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
        return StepPlan(step=plan.step, scheduled=tuple(rows), kv=plan.kv, pace=plan.pace)

    def commit(self, plan: StepPlan, verdict: Verdict) -> list[Update]:
        """Take over what a step decided; every request advances to its own v."""
        self._moving = True
        self.kv.complete(plan.step)
        self.incoming.settle()
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
            known, finish, spec = request.tokens, None, request.spec
            accepted = len(tokens) - 1
            if spec.hand_over and row.epoch != request.epoch:
                continue  # preempted meanwhile: its KV, which is all that is wanted of it, is computed again
            if spec.stop_tokens or spec.hand_over or len(known) + len(tokens) >= request.max_total:
                tokens, finish = request.cut_at_end(tokens)
            if spec.hand_over:
                # A step that was planned ahead has rows, and pages, for what would have come after the first token.
                flight.clear()
            known.extend(tokens)
            forks = verdict.fork_tokens.get(sequence_id, ()) if samples > 1 else ()
            if row.epoch == request.epoch:
                request.drafts = request.proposed = proposed
                if request.pace is not None:
                    self._note_drafts(request, row, accepted=accepted, verdict=verdict)
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

    def _note_drafts(self, request: Request, row: ScheduledRequest, *, accepted: int, verdict: Verdict) -> None:
        """Tell the pacer which drafts were accepted, and which ones come next."""
        pacer, pace = self.pacer, request.pace
        assert pacer is not None
        assert pace is not None
        if row.drafts:
            pacer.verified(pace, drafts=row.drafts, accepted=accepted)
        found = verdict.proposals.get(request.id)
        pacer.proposed(pace, found)
        if found is not None and found.source is not Source.DRAFTER:
            # Whatever scratch the drafter wrote belongs to other drafts.
            request.proposed = 0

    def abandon(self, plan: StepPlan | None) -> list[str]:
        """Give up the one step in flight, however far it got; None means that planning itself was interrupted. Returns
        the ids of the sequences that this ended.

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
        ended = []
        for request in [request for request in requests.values() if request.id in with_rows | with_pages]:
            if request.id in with_rows or request.state is State.LOADING:
                ended.append(request.id)
                self.roster.give_up(request, keep_end=False)
            elif request.state not in (State.WAITING, State.HELD):
                # What is held was written by earlier steps; this one gave it no rows, only pages that it did not need.
                self.roster.preempt(request, keep_end=False)
        return ended

    def _repair(self) -> None:
        """Start over if the last call was interrupted half-way: what each request holds is unknown then."""
        if self._moving:
            states = {request.id: request.state for request in self.requests.values()}
            # The others that end were being finished anyway: their callers have given them up.
            lost = [id for id in self._start_over() if states[id] in (State.FETCHING, State.LOADING)]
            self.incoming.updates += [Update(id, (), "failed") for id in lost]

    def _start_over(self, with_rows: Collection[str] = ()) -> list[str]:
        """Take the KV from every request, and empty the cache. Requests with rows in a step, requests that load or are
        held, and one whose peer's answer was being taken in, end; all others are computed again. Returns the ids of the
        requests that ended."""
        self._moving = True
        aside = {request.id: self.kv.holdings.set_pending_aside(request.kv) for request in self.roster.loading.values()}
        ended, kept, given_up = [], [], []
        for request in self.requests.values():
            asked = request.state is State.FETCHING and request.id in self.roster.fetching
            stays = asked or request.state in (State.WAITING, State.PREFILLING, State.DECODING)
            if stays and request.id not in with_rows and not request.flight and request.id in self.kv.sequences:
                kept.append(request)
            else:
                ended.append(request.id)
                if request.in_transfer:
                    given_up.append(GivenUp(request.id, aside.get(request.id, [])))
        self.kv.holdings.start_over(self.kv.sequences, {request.id for request in kept})
        self.roster.start_over(kept)
        self.incoming.forget_loads()
        self._next_step = self.kv.pool.next_step
        self.roster.given_up += given_up
        self._moving = False
        return ended

    def _end(self, request: Request, finish: str) -> None:
        if finish == "prefilled":
            self.roster.hold(request)
        else:
            self.roster.finish(request)

    def _commit_kv(self, request: Request, row: ScheduledRequest, v: int, *, keep_window: bool = False) -> None:
        flight, fed_to = request.flight, row.feed_to
        if not flight and fed_to is None and not keep_window:
            self.kv.commit(request.kv, v)
            return
        ahead = flight[0].num_rows if flight else 0
        self.kv.commit(request.kv, v, fed_to=fed_to, ahead=ahead, keep_window=keep_window)
        if fed_to is not None:
            request.fresh = True

    def _fork(self, parent: Request, row: ScheduledRequest, index: int, token: int) -> Update:
        """Start another continuation of the same prompt; it shares the prompt's pages if there is room to."""
        tokens = parent.tokens[: parent.prompt_len]
        tokens.append(token)
        ids = parent.spec.sequence_ids[index : index + 1]
        spec = replace(parent.spec, sequence_ids=ids, prompt=tokens, awaits_peer=False, awaits_tiers=False)
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
