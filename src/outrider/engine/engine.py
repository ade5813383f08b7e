"""The engine: schedule, run, commit, hand out.

api ──▶ add_request ──▶ scheduler ──StepPlan──▶ runner ──Verdict──▶ scheduler.commit ──Updates──▶ outputs
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from operator import index
from threading import Lock
from typing import Concatenate, ParamSpec, TypeVar

from outrider.config import EngineConfig
from outrider.engine.continuation import Continuation
from outrider.engine.outputs import Origin, RequestMetrics, RequestOutput, SpeculationCounts
from outrider.errors import BusyError, RequestError
from outrider.grammar import Grammar
from outrider.matching.grammars import CompiledGrammar, Grammars
from outrider.matching.matcher import Matcher
from outrider.models.load import LoadedModel
from outrider.runner.request import RunningRequest
from outrider.runner.runner import Runner, StepResult
from outrider.runner.sampler import RequestSampling, TokenLogprobs
from outrider.sampling import SamplingParams
from outrider.sanitizer import Sanitizer
from outrider.scheduler import RequestSpec, Scheduler
from outrider.scheduler.plan import StepPlan, StepRow, Update
from outrider.scheduler.scheduler import fork_name

Given = ParamSpec("Given")
Result = TypeVar("Result")


def alone(method: Callable[Concatenate[Engine, Given], Result]) -> Callable[Concatenate[Engine, Given], Result]:
    """One thread at a time may be inside the engine; a second one is told so, and changes nothing."""

    @wraps(method)
    def guarded(engine: Engine, /, *args: Given.args, **options: Given.kwargs) -> Result:
        if not engine.inside.acquire(blocking=False):
            raise BusyError(
                "another call is inside this engine, which serves one at a time; use AsyncLLM for many callers, "
                "or make one LLM for each thread"
            )
        try:
            return method(engine, *args, **options)
        finally:
            engine.inside.release()

    return guarded


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not ended: its continuations, the first of which has its own id."""

    output: RequestOutput
    params: SamplingParams
    continuations: list[Continuation]
    samplings: tuple[RequestSampling, ...]
    stop_tokens: frozenset[int]
    salt: str

    @property
    def finished(self) -> bool:
        return all(continuation.finished for continuation in self.continuations)


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
    ) -> None:
        """Put together by `engine.build.build_engine`."""
        self.config = config
        self.model = model
        self.scheduler = scheduler
        self.runner = runner
        self.sanitizer = sanitizer
        self.k = k
        self.grammars = grammars
        """None: a request that brings a grammar is refused."""
        self.speculation = SpeculationCounts()
        self.inside = Lock()
        """Held by the call that is at work; see `alone`."""
        self._leaving: deque[str] = deque()
        """Requests to end as soon as nobody is at work."""
        self._live: dict[str, LiveRequest] = {}
        self._owner: dict[str, tuple[str, int]] = {}
        """Scheduler's id of a continuation -> (request, which continuation)."""

    @property
    def supports_grammars(self) -> bool:
        return self.grammars is not None

    @property
    def max_model_len(self) -> int:
        return self.scheduler.kv.config.max_model_len

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def output(self, request_id: str) -> RequestOutput:
        """The result of a request that has not ended, as it grows."""
        return self._live[request_id].output

    # ---- requests come and go ----------------------------------------------------------------------

    @alone
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
        compiled: CompiledGrammar | None = None,
    ) -> None:
        """Queue a request, or refuse it with the reason. Nobody else's request is touched.

        Without `speculate` it decodes plainly: its drafter is fed, where it has KV, but proposes nothing.
        `compiled` is its grammar, from `grammars.compile`, for whoever cannot wait for that here.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"a request's id must be a string, got {type(request_id).__name__}")
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"request {request_id!r}: settings must be SamplingParams, got {type(params).__name__}; "
                "write SamplingParams(temperature=0, max_tokens=32)"
            )
        matcher = None if params.grammar is None else self._matcher(request_id, params, params.grammar, compiled)
        self._end_leavers()
        prompt_token_ids = self._checked_tokens(request_id, prompt_token_ids)
        # Checks the settings against the vocabulary, so before anybody takes the request.
        sampling = RequestSampling(
            params,
            vocab_size=self.model.spec.vocab_size,
            device=self.runner.device,
            prompt=prompt_token_ids,
            eos_token_ids=self.model.eos_ids,
            matcher=matcher,
        )
        room = self.max_model_len - len(prompt_token_ids)
        stop = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop |= frozenset(self.model.eos_ids)
        spec = RequestSpec(
            id=request_id,
            prompt=prompt_token_ids,
            max_tokens=max(1, room if params.max_tokens is None else params.max_tokens),
            k=self.k if speculate else 0,
            priority=priority,
            stop_tokens=stop,
            n=params.n,
            salt=salt,
            use_cache=params.prompt_logprobs is None,
        )
        samplings = (sampling, *(sampling.fork(number) for number in range(1, params.n)))
        live = LiveRequest(
            output=RequestOutput(
                request_id=request_id,
                prompt=prompt,
                prompt_token_ids=prompt_token_ids,
                outputs=[],
                metrics=RequestMetrics(arrival_s=time.monotonic()),
                prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(prompt_token_ids),
            ),
            params=params,
            continuations=[Continuation(i, params, self.model.tokenizer, stop) for i in range(params.n)],
            samplings=samplings,
            stop_tokens=stop,
            salt=salt,
        )
        live.output.outputs = [continuation.output for continuation in live.continuations]
        running = RunningRequest(
            request_id,
            prompt_token_ids,
            samplings[0],
            prompt_len=len(prompt_token_ids),
            stop_tokens=stop,
            forks=samplings[1:],
            prompt_logprobs=params.prompt_logprobs,
        )
        self.scheduler.add(spec)
        try:
            self._live[request_id] = live
            self._owner[request_id] = (request_id, 0)
            self._run_here(running, salt)
        except BaseException:
            # All know of it, or nobody does.
            self._drop(request_id)
            self._live.pop(request_id, None)
            raise

    def _matcher(
        self, request_id: str, params: SamplingParams, grammar: Grammar, compiled: CompiledGrammar | None
    ) -> Matcher:
        if self.grammars is None:
            raise RequestError(
                f"request {request_id!r}: output in a given form ({grammar.kind.value}) is not available: it takes a "
                "model with an end-of-text token, and the package xgrammar (pip install 'outrider[grammar]'); leave "
                "it out and check the text yourself"
            )
        if params.ignore_eos:
            raise RequestError(
                f"request {request_id!r}: ignore_eos and a grammar contradict each other, since a text that has its "
                "form ends; leave one of them out"
            )
        return self.grammars.matcher(self.grammars.compile(grammar).result() if compiled is None else compiled)

    def _checked_tokens(self, request_id: str, given: Sequence[int]) -> list[int]:
        """The prompt as plain token ids of this model, or the reason why it is none."""
        if isinstance(given, (str, bytes, bytearray)) or not isinstance(given, Sequence):
            raise RequestError(
                f"request {request_id!r}: a prompt must be text or a list of token ids, got {type(given).__name__}"
            )
        if not len(given):
            raise RequestError(f"request {request_id!r}: the prompt is empty; send at least one token")
        try:
            tokens = [index(token) for token in given]
        except TypeError:
            tokens = []
        if not tokens or any(isinstance(token, bool) for token in given):
            raise RequestError(f"request {request_id!r}: every token id must be a whole number")
        vocabulary = self.model.spec.vocab_size
        bad = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if bad is not None:
            raise RequestError(
                f"request {request_id!r}: token id {bad} is not in the vocabulary of {vocabulary} tokens; "
                "use this model's tokenizer"
            )
        return tokens

    def _run_here(self, request: RunningRequest, salt: str) -> None:
        self.runner.add(request)
        if self.sanitizer is not None:
            self.sanitizer.track(request.id, request.tokens, ("", salt))

    @alone
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and all its continuations; None if there is none of that name."""
        return self._abort(request_id)

    def leave(self, request_id: str) -> None:
        """Abort a request now or, if somebody is at work, before the next step. Never refuses."""
        self._leaving.append(request_id)
        if self.inside.acquire(blocking=False):
            try:
                self._end_leavers()
            finally:
                self.inside.release()

    def _end_leavers(self) -> None:
        while self._leaving:
            self._abort(self._leaving[0])
            # Only now: who is interrupted here tries again.
            self._leaving.popleft()

    def _abort(self, request_id: str) -> RequestOutput | None:
        live = self._live.get(request_id)
        if live is None:
            return None
        self._end_all(live, "abort")
        return self._close(live)

    def _end_all(self, live: LiveRequest, reason: str) -> None:
        for number, continuation in enumerate(live.continuations):
            self._drop(self._name(live, number))
            continuation.end(reason)

    def _name(self, live: LiveRequest, number: int) -> str:
        name = live.output.request_id
        return fork_name(name, number) if number else name

    def _drop(self, sequence: str) -> None:
        """The scheduler and the runner forget a continuation."""
        self.scheduler.abort(sequence)
        self.runner.forget(sequence)
        self._owner.pop(sequence, None)
        if self.sanitizer is not None:
            self.sanitizer.forget(sequence)

    @alone
    def reset_prefix_cache(self) -> None:
        """Prompts find nothing of what was computed so far; requests that run keep what they hold."""
        self.scheduler.kv.reset_cache()

    def _close(self, live: LiveRequest) -> RequestOutput:
        live.output.finished = True
        live.output.metrics.finished_s = time.monotonic()
        del self._live[live.output.request_id]
        return live.output

    # ---- one step ----------------------------------------------------------------------------------

    @alone
    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that changed. Their outputs are live objects, not copies.

        Whatever is raised inside ends the requests of the step, with `error` set; all others go on with the next.
        """
        self._end_leavers()
        plan = None
        try:
            plan, planned_s = self.scheduler.schedule(), time.monotonic()
            result = self.runner.run(plan)
            updates = self.scheduler.commit(plan, result.verdict)
            return self._hand_out(plan, result, updates, planned_s)
        except BaseException as error:
            self._abandon(plan, error)
            raise

    def _abandon(self, plan: StepPlan | None, error: BaseException) -> None:
        """A step was interrupted, nobody knows where: whoever was in it ends."""
        lost = dict.fromkeys(self.scheduler.abandon(plan).requests)
        # Some of its requests may have left the scheduler already, without their owners having been told.
        lost.update(dict.fromkeys(row.request for row in plan.rows) if plan is not None else {})
        owners = dict.fromkeys(self._owner[name][0] for name in lost if name in self._owner)
        for live in [self._live[owner] for owner in owners]:
            if not live.finished:
                live.output.error = f"its step was interrupted: {type(error).__name__}: {error}"
            for number, continuation in enumerate(live.continuations):
                self._drop(self._name(live, number))
                # What was interrupted may be the text itself.
                with suppress(Exception):
                    continuation.end("error")
                continuation.output.finish_reason = continuation.output.finish_reason or "error"
            self._close(live)

    def _hand_out(
        self, plan: StepPlan, result: StepResult, updates: Sequence[Update], planned_s: float
    ) -> list[RequestOutput]:
        ran = {
            row.request: (row.drafts, len(tokens)) for row, tokens in zip(plan.rows, result.verdict.tokens, strict=True)
        }
        changed: dict[str, LiveRequest] = {}
        for row in plan.rows:
            self._note_row(row, result, planned_s)
        for update in updates:
            place = self._owner.get(update.request) or self._new_fork(update)
            if place is None:
                continue
            owner, number = place
            live = changed[owner] = self._live[owner]
            if owner in result.failed or update.finish == "failed":
                live.output.error = result.failed.get(owner, "its KV could not be loaded")
                self._end_all(live, "error")
            else:
                self._take(live, number, update, ran.get(update.request, (0, 0)), result)
        for live in changed.values():
            if live.finished:
                self._close(live)
        return [live.output for live in changed.values()]

    def _note_row(self, row: StepRow, result: StepResult, planned_s: float) -> None:
        live = self._live[self._owner[row.request][0]]
        metrics = live.output.metrics
        if metrics.scheduled_s is None:
            metrics.scheduled_s = planned_s
            # Where its first rows begin. It may have ended with them, so the scheduler cannot be asked.
            metrics.cached_tokens = row.start
        for position, score in result.prompt_logprobs.get(row.request, ()):
            assert live.output.prompt_logprobs is not None
            live.output.prompt_logprobs[position] = score

    def _new_fork(self, update: Update) -> tuple[str, int] | None:
        """The first token of a further continuation: from now on it runs on its own. None if its request has failed."""
        name, _, digits = update.request.rpartition("#")
        live, number = self._live[name], int(digits)
        if live.output.error is not None:
            return None
        prompt = live.output.prompt_token_ids
        self._owner[update.request] = (name, number)
        sampling = live.samplings[number]
        running = RunningRequest(update.request, prompt, sampling, prompt_len=len(prompt), stop_tokens=live.stop_tokens)
        running.take(update.tokens)
        self._run_here(running, live.salt)
        return name, number

    def _take(self, live: LiveRequest, number: int, update: Update, ran: tuple[int, int], result: StepResult) -> None:
        """One continuation goes on. `ran`: drafts that were verified, tokens that this gave before any cut."""
        metrics, tokens, (drafts, given) = live.output.metrics, update.tokens, ran
        if tokens and metrics.first_token_s is None:
            metrics.first_token_s = time.monotonic()
        metrics.steps += 1
        origins = [Origin.PLAIN] * len(tokens)
        if drafts:
            origins = token_origins(given, drafts)
            metrics.speculation.count(drafts, given - 1)
            self.speculation.count(drafts, given - 1)
        logprobs = self._logprobs(update, number, result)
        stopped = live.continuations[number].take(tokens, origins, logprobs, update.finish)
        if stopped or update.finish is not None:
            self._drop(update.request)

    def _logprobs(self, update: Update, number: int, result: StepResult) -> list[TokenLogprobs] | None:
        if update.request in result.logprobs:
            return result.logprobs[update.request]
        owner = self._owner[update.request][0]
        forks = result.fork_logprobs.get(owner)
        if number and forks is not None:
            first = forks[number - 1]
            return None if first is None else [first]
        return None


def token_origins(tokens: int, drafts: int) -> list[Origin]:
    """All but the last of the tokens that verifying `drafts` yields are accepted drafts."""
    last = Origin.BONUS if tokens == drafts + 1 else Origin.CORRECTED
    return [Origin.ACCEPTED] * (tokens - 1) + [last]
