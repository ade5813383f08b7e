"""Brings outputs up to date after a step: text, log-probabilities, origins of tokens, ends, tickets of hand-overs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from outrider.engine.continuation import Continuation
from outrider.engine.live import LiveRequests
from outrider.engine.outputs import Origin, RequestOutput, SpeculationCounts, TransferTimes
from outrider.engine.request import LiveRequest
from outrider.engine.transfers import EngineTransfers, settings_digest
from outrider.errors import RequestError
from outrider.runner.request import RunningRequest
from outrider.runner.runner import Runner, StepResult
from outrider.runner.sampler import TokenLogprobs
from outrider.scheduler import Scheduler
from outrider.scheduler.plan import ScheduledRequest, StepPlan, Update, Verdict
from outrider.transfer.messages import ScoredToken
from outrider.transfer.records import Fetched, FirstToken


class Delivery:
    def __init__(
        self, live: LiveRequests, scheduler: Scheduler, runner: Runner, transfers: EngineTransfers | None
    ) -> None:
        self._live = live
        self._scheduler = scheduler
        self._runner = runner
        self._transfers = transfers
        self.speculation = SpeculationCounts()

    def take_answers(self) -> dict[str, RequestOutput]:
        """Take in what has come from other workers: first tokens with their log-probabilities, and KV that was lost.
        Returns the outputs that this changed."""
        if self._transfers is None:
            return {}
        scored: dict[str, list[TokenLogprobs]] = {}
        for answer in self._transfers.advance():
            if answer.sequence in self._live.sequences:
                self._note_answer(answer, scored)
        self.note_transfers()
        updates = self._scheduler.take_updates()
        nothing = StepResult(Verdict(step=-1, tokens=(), proposed=()), scored, {}, {}, {})
        return self._take_updates(updates, {}, nothing) if updates else {}

    def _note_answer(self, answer: Fetched, scored: dict[str, list[TokenLogprobs]]) -> None:
        live, continuation = self._live.sequences[answer.sequence]
        live.transfer_failure, offer = answer.reason, answer.offer
        if offer is None or not live.takes_first_token:
            return
        continuation.sampling.adopt_seed(offer.seed)
        continuation.sampling.append([offer.first_token])
        self._runner.requests[answer.sequence].adopt_drafts(offer.drafts, offer.drafts_worth_asking)
        wanted, score = continuation.sampling.params.logprobs, offer.logprobs
        if wanted is not None and score is not None:
            scored[answer.sequence] = [TokenLogprobs(score.token, score.logprob, score.rank, tuple(score.top[:wanted]))]

    def note_transfers(self) -> None:
        for settled in self._transfers.take_settled() if self._transfers is not None else ():
            live, _continuation = self._live.sequences.get(settled.sequence, (None, None))
            if live is not None:
                live.transfer_failure = settled.reason
                metrics = live.output.metrics
                metrics.cached_tokens, metrics.transferred_tokens = settled.cached_tokens, settled.transferred_tokens
                metrics.transfer = TransferTimes(
                    queued_s=settled.queued_s,
                    read_s=settled.read_s,
                    confirmed_s=settled.confirmed_s,
                    bytes=settled.bytes,
                )

    def hand_out(
        self, plan: StepPlan, result: StepResult, updates: Sequence[Update], planned_s: float
    ) -> dict[str, RequestOutput]:
        """Bring the outputs up to date; returns those that changed."""
        verified = {
            row.sequence_id: (row.drafts, len(tokens))
            for row, tokens in zip(plan.scheduled, result.verdict.tokens, strict=True)
        }
        for row in plan.scheduled:
            self._note_row(row, result, planned_s)
        return self._take_updates(updates, verified, result)

    def _take_updates(
        self, updates: Sequence[Update], verified: Mapping[str, tuple[int, int]], result: StepResult
    ) -> dict[str, RequestOutput]:
        changed: dict[str, LiveRequest] = {}
        for update in updates:
            live, continuation = self._live.sequences.get(update.sequence_id, (None, None))
            if live is None or continuation is None:
                continue  # another continuation has failed, and the request with it
            changed[live.id] = live
            gained, failure = verified.get(update.sequence_id, (0, 0)), result.failed.get(update.sequence_id)
            if update.finish == "failed":
                why = live.transfer_failure or "a transfer was interrupted"
                live.output.error_code = "kv_transfer_failed"
                self._fail(live, f"its KV did not come from its prefill worker: {why}; send the request again")
            elif failure is None:
                self._take(live, continuation, update, gained, result)
            else:
                # The last token stands for the one that could not be chosen; drafts before it may have ended the text.
                self._take(live, continuation, _before_failure(update, gained[1]), gained, result)
                if not continuation.finished:
                    self._fail(live, str(failure), is_callers=isinstance(failure, RequestError))
        for live in changed.values():
            if live.finished:
                self._live.close(live)
        return {live.id: live.output for live in changed.values()}

    def _fail(self, live: LiveRequest, error: str, *, is_callers: bool = False) -> None:
        live.output.error, live.output.error_is_callers = error, is_callers
        self._live.end_all(live, "error")

    def _note_row(self, row: ScheduledRequest, result: StepResult, planned_s: float) -> None:
        output = self._live.sequences[row.sequence_id][0].output
        metrics = output.metrics
        if metrics.scheduled_s is None:
            metrics.scheduled_s = planned_s
            # Where its first rows begin. It may have ended with them, so the scheduler cannot be asked.
            if metrics.transfer is None:
                metrics.cached_tokens = row.start
        for position, score in result.prompt_logprobs.get(row.sequence_id, ()):
            assert output.prompt_logprobs is not None
            output.prompt_logprobs[position] = score

    def _take(
        self,
        live: LiveRequest,
        continuation: Continuation,
        update: Update,
        verified: tuple[int, int],
        result: StepResult,
    ) -> None:
        """Add what a continuation gained; `verified` is (drafts verified, tokens that this gave before any cut)."""
        metrics, tokens, (drafts, given) = live.output.metrics, update.tokens, verified
        if tokens and metrics.first_token_s is None:
            metrics.first_token_s = time.monotonic()
        # A first token that a prefill worker sampled took no step here.
        is_new_fork = not continuation.output.tokens
        metrics.steps += given > 0 or is_new_fork
        origins = [Origin.PLAIN] * len(tokens)
        if drafts:
            origins = token_origins(given, drafts)[: len(tokens)]
            metrics.speculation.count(drafts, given - 1)
            self.speculation.count(drafts, given - 1)
        if not continuation.output.tokens:
            self._start_fork(live, continuation, update)
        logprobs = self._logprobs(live, continuation, result)
        if update.finish == "prefilled":
            self._hand_over(live, continuation, tokens[0], logprobs)
            return
        stopped = continuation.take(tokens, origins, logprobs, update.finish)
        if stopped or update.finish is not None:
            self._runner.drafting.finish(update.sequence_id, live.salt, continuation.output.tokens)
            self._live.drop(update.sequence_id)

    def _hand_over(
        self, live: LiveRequest, continuation: Continuation, token: int, logprobs: Sequence[TokenLogprobs] | None
    ) -> None:
        """End a request here whose prompt was computed for a decode worker, and promise its KV to that worker."""
        assert self._transfers is not None
        record = self._scheduler.requests[continuation.sequence_id]
        finish = "stop" if token in record.spec.stop_tokens else "length"
        if continuation.take((token,), (Origin.PLAIN,), logprobs, finish):
            continuation.end(finish)
        running = self._runner.requests[continuation.sequence_id]
        first = FirstToken(
            token,
            continuation.sampling.request_seed,
            None if not logprobs else ScoredToken(**logprobs[0]._asdict()),
            tuple(running.drafts),
            running.next_drafts_worth_asking,
            settings_digest(continuation.sampling.params),
        )
        prompt = record.tokens[: record.prompt_len]
        live.output.ticket = self._transfers.hand_over(continuation.sequence_id, prompt, live.salt, first)
        self._live.leave(continuation.sequence_id)

    def _start_fork(self, live: LiveRequest, continuation: Continuation, update: Update) -> None:
        """Let a fork, whose first token was drawn beside its request's, run on its own from now on."""
        record = self._scheduler.requests.get(update.sequence_id)
        if record is not None:
            continuation.sampling.append(update.tokens)
            self._live.start(live, continuation, RunningRequest(record, continuation.sampling))
        else:
            # Its first token was its last.
            output, prompt_len = continuation.output, live.output.prompt_len
            output.tokens, output.prompt_len = live.output.tokens[:prompt_len], prompt_len
            output.tokens.extend(update.tokens)

    def _logprobs(
        self, live: LiveRequest, continuation: Continuation, result: StepResult
    ) -> list[TokenLogprobs] | None:
        if continuation.sequence_id in result.logprobs:
            return result.logprobs[continuation.sequence_id]
        index, forks = continuation.output.index, result.fork_logprobs.get(live.continuations[0].sequence_id)
        if index and forks is not None:
            first = forks[index - 1]
            return None if first is None else [first]
        return None


def _before_failure(update: Update, given: int) -> Update:
    """Returns what a sequence gained before the last of the `given` tokens, unless the update ends earlier already."""
    return update if len(update.tokens) < given else Update(update.sequence_id, update.tokens[: given - 1], None)


def token_origins(tokens: int, drafts: int) -> list[Origin]:
    """Returns where the tokens of a verification came from: all but the last are accepted drafts."""
    last = Origin.BONUS if tokens == drafts + 1 else Origin.CORRECTED
    return [Origin.ACCEPTED] * (tokens - 1) + [last]
