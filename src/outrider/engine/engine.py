"""The engine: schedule, run, commit, hand out.

api ──▶ add_request ──▶ scheduler ──StepPlan──▶ runner ──Verdict──▶ scheduler.commit ──Updates──▶ outputs

Callers know a request by the id they gave it. Each of its continuations is a sequence with a key of its own, which
the engine makes up and which the scheduler, the runner and the KV manager know it by.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import wraps
from itertools import count
from threading import Lock
from typing import Concatenate, ParamSpec, TypeVar

from outrider.config import EngineConfig
from outrider.engine.continuation import Continuation
from outrider.engine.delivery import Delivery
from outrider.engine.live import LiveRequests
from outrider.engine.outputs import (
    RequestMetrics,
    RequestOutput,
    TransferCounters,
)
from outrider.engine.request import LiveRequest, checked_prompt
from outrider.engine.transfers import EngineTransfers, settings_digest
from outrider.errors import BusyError, RequestError
from outrider.events.stream import KVEvents
from outrider.grammar import Grammar
from outrider.kv.checked import whole_number
from outrider.models.load import LoadedModel
from outrider.runner.request import RunningRequest
from outrider.runner.runner import Runner
from outrider.runner.sampler import RequestSampling
from outrider.sampling import SamplingParams
from outrider.sanitizer import Sanitizer
from outrider.scheduler import RequestSpec, Scheduler
from outrider.scheduler.pacing.costs import StepTimes
from outrider.scheduler.plan import StepPlan
from outrider.structured.grammars import Grammars
from outrider.structured.matcher import Matcher
from outrider.transfer.cache_tier import TierCounters

Given = ParamSpec("Given")
Result = TypeVar("Result")


def exclusive(method: Callable[Concatenate[Engine, Given], Result]) -> Callable[Concatenate[Engine, Given], Result]:
    """Let one thread at a time into the engine; a call from another one raises, and changes nothing."""

    @wraps(method)
    def guarded(engine: Engine, /, *args: Given.args, **options: Given.kwargs) -> Result:
        if not engine.lock.acquire(blocking=False):
            raise BusyError(
                "another call is inside this engine, which serves one at a time; use AsyncLLM for many callers, "
                "or make one LLM for each thread"
            )
        try:
            return method(engine, *args, **options)
        finally:
            engine.lock.release()

    return guarded


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        scheduler: Scheduler,
        runner: Runner,
        *,
        sanitizer: Sanitizer | None = None,
        k: int = 0,
        grammars: Grammars | None = None,
        transfers: EngineTransfers | None = None,
        events: KVEvents | None = None,
    ) -> None:
        """`engine.build.build_engine` puts an engine together."""
        self.config = config
        self.model = model
        self.scheduler = scheduler
        self.runner = runner
        self.pacer = scheduler.pacer
        """None if the number of drafts is fixed."""
        self.sanitizer = sanitizer
        self.k = k
        self.grammars = grammars
        """None if the engine cannot keep to grammars: it then refuses requests that bring one."""
        self.transfers = transfers
        """None if KV lies on the device only: no other worker and no tier holds any."""
        self._asks_tiers = transfers is not None and transfers.asks_tiers
        self.events = events
        """None if routers are not told what the prefix cache holds."""
        self.lock = Lock()
        """Held by the call that is inside the engine: see `exclusive`."""
        self._to_abort: deque[str] = deque()
        """Requests to abort as soon as no call is inside the engine."""
        self._live = LiveRequests(scheduler, runner, sanitizer)
        self._delivery = Delivery(self._live, scheduler, runner, transfers)
        self.speculation = self._delivery.speculation
        self._sequence_numbers = count()
        self._idle = False
        """Whether the last step found nothing to do."""

    @property
    def supports_grammars(self) -> bool:
        return self.grammars is not None

    @property
    def exchanges_kv(self) -> bool:
        """Whether this engine hands KV over to other workers, or takes it from them."""
        return self.transfers is not None and self.transfers.exchanges_kv

    @property
    def max_model_len(self) -> int:
        return self.scheduler.kv.config.max_model_len

    @property
    def has_work(self) -> bool:
        return bool(self._live.requests)

    @property
    def waits(self) -> bool:
        """Whether nothing can be done before other workers answer or KV arrives; `wait` sleeps until then."""
        return self.transfers is not None and self._idle and self.has_work

    def wait(self, limit_s: float = 1.0) -> None:
        """Sleep until a step has something to do, at most this long. Called between steps, if the engine waits."""
        assert self.transfers is not None
        self.transfers.wait(limit_s)

    def wake(self) -> None:
        """End a wait, from any thread."""
        if self.transfers is not None:
            self.transfers.wake()

    @property
    def tend_within_s(self) -> float | None:
        """Seconds within which `tend` must be called if no request comes; None if it need not be."""
        return None if self.transfers is None else self.transfers.limit_s

    @exclusive
    def tend(self) -> None:
        """Give back KV that is not held for other workers any more, while there are no requests."""
        if self.transfers is not None and not self._live.requests:
            self.transfers.advance()
            self._publish_events()

    def tier_counters(self) -> dict[str, TierCounters]:
        """Returns what each tier behind the device has done, the nearest first."""
        return {} if self.transfers is None else {tier.name: tier.counters for tier in self.transfers.tiers}

    def transfer_counters(self) -> TransferCounters:
        if self.transfers is None:
            return TransferCounters()
        driver = self.transfers.driver
        return TransferCounters(
            **asdict(driver.counters),
            recomputed_prompts=self.transfers.recomputed_prompts,
            held_pages=driver.lender.held_pages,
            leases=len(driver.lender.leases),
        )

    def close(self) -> None:
        """End the engine's connections to other workers. Nothing is written to its memory after this returns."""
        if self.transfers is not None:
            self.transfers.close()
        if self.events is not None:
            self.events.close()

    def _publish_events(self) -> None:
        if self.events is not None:
            self.events.flush()

    @property
    def live_requests(self) -> list[LiveRequest]:
        """The requests that have not ended."""
        return list(self._live.requests.values())

    def output(self, request_id: str) -> RequestOutput:
        """Returns the result of a request that has not ended: a live object, which grows."""
        return self._live.requests[request_id].output

    # ---- requests come and go ----------------------------------------------------------------------

    @exclusive
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        salt: str = "",
        speculate: bool = True,
        num_speculative_tokens: int | None = None,
        hand_over: bool = False,
        ticket: str | None = None,
        compute_prompt: bool = False,
    ) -> None:
        """Queue a request, or refuse it with the reason; no other request is affected.

        Without `speculate` it decodes plainly: a drafter with KV is fed, but proposes nothing. With
        `num_speculative_tokens` so many drafts are proposed and verified at each of its steps, where the engine would
        choose. With `hand_over` it ends with its first token, and its KV is held for a decode worker, which the
        output's `ticket` leads to it. With such a `ticket` it starts from the KV that a prefill worker holds. With
        `compute_prompt` even a decode worker under the policy `fail` computes a prompt without one.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"a request's id must be a string, got {type(request_id).__name__}")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"request {request_id!r}: settings must be SamplingParams, got {type(params).__name__}; "
                "write SamplingParams(temperature=0, max_tokens=32)"
            )
        if not self.exchanges_kv and (hand_over or ticket is not None):
            raise RequestError(
                f"request {request_id!r}: this engine neither hands KV over nor takes it; give it a kv_transfer_config"
            )
        if hand_over:
            # The decode worker makes the continuations, and computes the prompt's scores.
            params = replace(params, n=1, prompt_logprobs=None)
        # To score a prompt, every row of it has to be computed here.
        opened, declines = None, params.prompt_logprobs is not None
        if self.transfers is not None and ticket is not None:
            opened = self.transfers.open_ticket(request_id, ticket)
            if declines and not self.transfers.computes_prompts:
                raise RequestError(
                    f"request {request_id!r}: prompt_logprobs needs the whole prompt computed, and this worker "
                    "computes no prompts (kv_load_failure_policy fail); leave prompt_logprobs out, or send the request "
                    "to a worker that computes prompts"
                )
        fixed_k = self._fixed_k(request_id, num_speculative_tokens, speculate=speculate, hand_over=hand_over)
        matcher = None if params.grammar is None else self._matcher(request_id, params, params.grammar)
        self._abort_pending()
        if request_id in self._live.requests:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        tokens = checked_prompt(request_id, prompt_token_ids, vocab_size=self.model.spec.vocab_size)
        # Checks the settings against the vocabulary, so before the scheduler takes the request.
        sampling = RequestSampling(
            params,
            vocab_size=self.model.spec.vocab_size,
            device=self.runner.device,
            prompt=tokens,
            eos_token_ids=self.model.eos_ids,
            matcher=matcher,
        )
        samplings = (sampling, *(sampling.fork(index) for index in range(1, params.n)))
        continuations = [
            # The number makes the key unique, whatever ids callers choose; the rest is for people who debug.
            Continuation(f"{request_id}~{next(self._sequence_numbers)}", index, each, self.model.tokenizer)
            for index, each in enumerate(samplings)
        ]
        live = LiveRequest(
            output=RequestOutput(
                request_id=request_id,
                prompt=prompt,
                outputs=[continuation.output for continuation in continuations],
                metrics=RequestMetrics(arrival_s=time.monotonic()),
                tokens=tokens,
                prompt_len=len(tokens),
                prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(tokens),
            ),
            continuations=continuations,
            salt=salt,
        )
        room = self.max_model_len - len(tokens)
        spec = RequestSpec(
            id=request_id,
            sequence_ids=tuple(continuation.sequence_id for continuation in continuations),
            prompt=tokens,
            max_tokens=max(1, room if params.max_tokens is None else params.max_tokens),
            k=self.k if fixed_k is None else fixed_k,
            fixed_k=fixed_k is not None,
            priority=priority,
            stop_tokens=frozenset(
                params.stop_tokens if params.ignore_eos else (*params.stop_tokens, *self.model.eos_ids)
            ),
            salt=salt,
            use_cache=params.prompt_logprobs is None,
            hand_over=hand_over,
            awaits_peer=opened is not None and not declines,
            awaits_tiers=self._asks_tiers and ticket is None and params.prompt_logprobs is None,
            compute_prompt=compute_prompt,
        )
        try:
            record = self.scheduler.add(spec)
            self._live.enter(live)
            running = RunningRequest(record, sampling, forks=samplings[1:], prompt_logprobs=params.prompt_logprobs)
            self._live.start(live, continuations[0], running)
            if self.transfers is not None and opened is not None:
                if declines:
                    self.transfers.decline(opened, tokens, salt)
                    return
                sequence_id = continuations[0].sequence_id
                live.takes_first_token = params.n == 1 and opened.settings == settings_digest(params)
                self.transfers.fetch(sequence_id, opened, tokens, salt, takes_token=live.takes_first_token)
            elif self.transfers is not None and ticket is None:
                self.transfers.note_plain_prompt(had_no_room=compute_prompt)
                self.transfers.enter(continuations[0].sequence_id)
        except BaseException:
            # Either all parts know the request, or none does.
            self._live.drop_all(live)
            self._live.requests.pop(request_id, None)
            raise

    def _fixed_k(self, request_id: str, wanted: int | None, *, speculate: bool, hand_over: bool) -> int | None:
        """Returns the number of drafts that a request asks for, or refuses it; None leaves it to the engine."""
        if wanted is None:
            return None if speculate else 0
        whole_number(
            wanted,
            f"request {request_id!r}: num_speculative_tokens",
            at_least=0,
            advice="0 turns drafting off",
            error=RequestError,
        )
        if wanted and not speculate:
            raise RequestError(
                f"request {request_id!r}: num_speculative_tokens is {wanted}, but speculate is false, which turns "
                "drafting off; leave one of them out"
            )
        if hand_over:
            # The decode worker verifies; whether it can verify so many is its own matter.
            return min(wanted, self.k)
        if wanted and not self.k:
            raise RequestError(
                f"request {request_id!r}: num_speculative_tokens is {wanted}, but this engine has no drafter; leave it "
                "out, or start the engine with a speculative_config"
            )
        if wanted > self.k:
            raise RequestError(
                f"request {request_id!r}: num_speculative_tokens is {wanted}, but this engine drafts at most {self.k} "
                "tokens per step; ask for that many or fewer"
            )
        return wanted

    def _matcher(self, request_id: str, params: SamplingParams, grammar: Grammar) -> Matcher:
        if self.grammars is None:
            raise RequestError(
                f"request {request_id!r}: structured output ({grammar.kind.value}) is not available: it needs a "
                "model with an end-of-text token and the package llguidance (pip install 'outrider[grammar]'); leave "
                "the grammar out and check the text yourself"
            )
        if params.ignore_eos:
            raise RequestError(
                f"request {request_id!r}: ignore_eos and a grammar contradict each other, since text that "
                "completes its grammar ends; leave one of them out"
            )
        return self.grammars.matcher(grammar)

    @exclusive
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and all its continuations; None if there is none of that id."""
        live = self._live.requests.get(request_id)
        self._to_abort.append(request_id)
        self._abort_pending()
        return None if live is None else live.output

    def abort_soon(self, request_id: str) -> None:
        """Abort a request now or, if another call is inside the engine, before the next step."""
        self._to_abort.append(request_id)
        if self.lock.acquire(blocking=False):
            try:
                self._abort_pending()
            finally:
                self.lock.release()

    def _abort_pending(self) -> None:
        while self._to_abort:
            self._abort(self._to_abort[0])
            # Only now: an abort that is interrupted is tried again.
            self._to_abort.popleft()
        self._settle_if_idle()

    def _abort(self, request_id: str) -> None:
        live = self._live.requests.get(request_id)
        if live is not None:
            self._live.end_all(live, "abort")
            self._live.close(live)
            self._publish_events()

    @exclusive
    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache and the host's memory behind it; requests that run keep what they hold."""
        self.scheduler.kv.reset_cache()
        if self.transfers is not None:
            self.transfers.driver.offloading.clear()
        self.runner.drafting.forget_finished()
        self._publish_events()

    def clear_counts(self) -> None:
        """Counts from zero: the requests so far were not a user's."""
        self.scheduler.clear_counts()
        self.speculation.clear()
        if self.runner.drafting.lookup is not None:
            self.runner.drafting.lookup.clear_counts()
        if self.transfers is not None:
            self.transfers.recomputed_prompts = 0
            for tier in self.transfers.tiers:
                tier.counters = TierCounters()

    # ---- one step ----------------------------------------------------------------------------------

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that changed. Their outputs are live objects, not copies.

        An exception ends the requests of the step, with `error` set, and is raised again; all other requests go on
        with the next step.
        """
        self._abort_pending()
        plan, started_s = None, time.perf_counter()
        try:
            changed = self._delivery.take_answers()
            plan, planned_s = self.scheduler.schedule(), time.monotonic()
            if self.transfers is not None:
                self.transfers.start_loads()
                self._idle = not (plan.scheduled or plan.kv.copies or changed)
            result = self.runner.run(plan)
            updates = self.scheduler.commit(plan, result.verdict)
            if self.transfers is not None:
                self.transfers.store()
            self._delivery.note_transfers()
            changed |= self._delivery.hand_out(plan, result, updates, planned_s)
            if self.pacer is not None and result.work is not None:
                work, total_s = result.work, time.perf_counter() - started_s
                times = StepTimes(work.target_s, work.draft_s, total_s)
                self.pacer.observe(work.shape, times, tokens=sum(len(update.tokens) for update in updates))
            self._settle_if_idle()
            return list(changed.values())
        except BaseException as error:
            self._abandon(plan, error)
            raise
        finally:
            self._publish_events()

    def _settle_if_idle(self) -> None:
        """Without another step to come, nothing else ends what the last one has begun, and frees its threads."""
        if not self.has_work:
            self.runner.settle()

    def _abandon(self, plan: StepPlan | None, error: BaseException) -> None:
        """End the requests of a step that was interrupted: how far it got is unknown."""
        # Its pages may be another's next.
        self.runner.settle()
        lost = set(self.scheduler.abandon(plan))
        # Some of its sequences may have left the scheduler already, without their callers having been told.
        if plan is not None:
            lost.update(row.sequence_id for row in plan.scheduled)
        for live in [live for live in self._live.requests.values() if not lost.isdisjoint(live.sequence_ids)]:
            if not live.finished:
                live.output.error = f"its step was interrupted: {type(error).__name__}: {error}"
            self._live.drop_all(live)
            for continuation in live.continuations:
                # The text itself may be what was interrupted.
                with suppress(Exception):
                    continuation.end("error")
                continuation.output.finish_reason = continuation.output.finish_reason or "error"
            self._live.close(live)
