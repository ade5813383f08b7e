"""Carries out step plans: page copies, target rows, verdict, feed, propose; in this order, batched over requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Backend
from outrider.backends.batch import Batch, Span
from outrider.errors import OutriderError
from outrider.kv.layout import KVConfig, KVLayout
from outrider.models.decoder import Decoder, DecoderOutput
from outrider.models.kv_groups import LayerGroups
from outrider.runner.drafting import DraftedStep, Drafting
from outrider.runner.logprobs import ROWS_AT_ONCE
from outrider.runner.page_store import PageStore
from outrider.runner.request import RunningRequest
from outrider.runner.sampler import FAILED, Sampler, SampleRow, TokenLogprobs, token_logprobs
from outrider.runner.tables import BlockTables, SequenceTables
from outrider.sanitizer import Sanitizer
from outrider.sanitizer.watch import StepWatch
from outrider.scheduler.pacing.costs import StepShape
from outrider.scheduler.pacing.worth import Calibration
from outrider.scheduler.plan import ScheduledRequest, StepPlan, Verdict
from outrider.speculative.drafter import Drafter
from outrider.speculative.lookup import Lookup
from outrider.speculative.verify import accept


class StepResult(NamedTuple):
    verdict: Verdict
    logprobs: dict[str, list[TokenLogprobs]]
    """For requests that asked: one entry per token of the verdict."""
    fork_logprobs: dict[str, list[TokenLogprobs | None]]
    prompt_logprobs: dict[str, list[tuple[int, TokenLogprobs]]]
    """(position, …) of prompt tokens, as their rows ran."""
    failed: dict[str, OutriderError]
    """By sequence id: why no token could be chosen. A RequestError means that the request's own settings forbid all."""
    work: StepWork | None = None
    """None for a step without rows."""


class StepWork(NamedTuple):
    """What a step had to do, and how long the runner took for it."""

    shape: StepShape
    target_s: float
    """Running the target, and sampling from it."""
    draft_s: float
    """Feeding the drafter, and having it propose."""


class SampledRows(NamedTuple):
    """The rows of a batch that a step samples."""

    rows: list[int]
    """Rows whose logits are wanted."""
    draws: list[SampleRow]
    row_of_draw: list[int]
    """For each draw, its index in `rows`: the forks of a request draw from one row."""

    @property
    def contiguous(self) -> tuple[int, int] | None:
        """The rows as an interval [first, end), if they are one."""
        rows = self.rows
        if not rows or rows[-1] - rows[0] >= len(rows):
            return None
        return rows[0], rows[-1] + 1


class Runner:
    def __init__(
        self,
        target: Decoder,
        target_groups: LayerGroups,
        drafter: Drafter | None,
        layout: KVLayout,
        config: KVConfig,
        *,
        kv_dtype: torch.dtype,
        sanitizer: Sanitizer | None = None,
        least_confidence: float = 0.0,
        calibration: Calibration | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        """`least_confidence`: drafts are verified only while their joint probability, by the drafter's own estimate, is
        at least this; 0 verifies all of them. `calibration` corrects these estimates for requests whose drafts a pacer
        chooses, and `lookup` finds further drafts for them."""
        self.backend: Backend = target.backend
        self.device = self.backend.device
        self._layout = layout
        self._footprint = layout.footprint
        self.requests: dict[str, RunningRequest] = {}
        owners: tuple[LayerGroups, ...] = (target_groups,)
        if drafter is not None and drafter.layer_groups is not None:
            owners += (drafter.layer_groups,)
        self.owners = owners
        """The target's layers, then the drafter's if it has any, in the order of the layout's groups."""
        self.store = PageStore(
            layout, config.arena_pages, owners, dtype=kv_dtype, backend=self.backend, settle=self.settle
        )
        self._tables = BlockTables(layout, max_model_len=config.max_model_len, device=self.device)
        self._batches = self.backend.batch_builder(layout, self._tables)
        self._decoder = target
        self._target = target.bind(self.store.layers(target_groups, 0), target_groups)
        self._sampler = Sampler(target.spec.vocab_size, self.backend)
        self._watch = StepWatch(layout, sanitizer, SequenceTables(self._tables)) if sanitizer is not None else None
        self.drafting = Drafting(
            drafter,
            layout,
            self.requests,
            self._sampler,
            watch=self._watch,
            least_confidence=least_confidence,
            calibration=calibration,
            lookup=lookup,
        )
        self._other_backend: Backend | None = None
        """That of a drafter that was loaded for another one."""
        if drafter is not None:
            if drafter.backend is not self.backend:
                self._other_backend = drafter.backend
            groups = layout.draft_groups
            kv = self.store.layers(drafter.layer_groups, groups.start) if drafter.layer_groups is not None else ()
            self.drafting.bind(self._batches, kv)

    def add(self, request: RunningRequest) -> None:
        self.requests[request.id] = request

    def forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self.drafting.forget(request_id)

    # ---- one step ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode(), self.backend.step(), self._drafter_step():
            result = self._run(plan)
        if self.store.exposed:
            # What a step wrote may be read as soon as it is committed.
            self.settle()
        return result

    def settle(self) -> None:
        """Waits for what the last step has left to threads of the backend."""
        self.backend.settle()
        if self._other_backend is not None:
            self._other_backend.settle()

    def _drafter_step(self) -> AbstractContextManager[None]:
        return nullcontext() if self._other_backend is None else self._other_backend.step()

    def _run(self, plan: StepPlan) -> StepResult:
        plan.kv.apply_to(self._tables)
        if self._watch is not None:
            self._watch.begin(plan)
        self.store.copy(plan.kv.copies)
        result = StepResult(Verdict(step=plan.step, tokens=(), proposed=()), {}, {}, {}, {})
        if not plan.scheduled:
            return result
        for row in plan.scheduled:
            self.requests[row.sequence_id].table_row = self._tables.row_of(row.sequence_id)
        started_s = perf_counter()
        batch = self._target_batch(plan.scheduled)
        sampled = self._sampled_rows(plan.scheduled, batch.first_rows)
        output = self._target.forward(batch, taps=self._footprint.taps, scored=sampled.contiguous)
        tokens, forks = self._sample(plan.scheduled, batch.first_rows, sampled, output, result)
        ends = self._append(plan.scheduled, tokens)
        targeted_s = perf_counter()
        drafted = self.drafting.run(plan, batch.first_rows, ends, tokens, output.taps)
        work = StepWork(self._shape(plan, len(batch.token_ids), drafted), targeted_s - started_s, drafted.drafter_s)
        for row, new in zip(plan.scheduled, tokens, strict=True):
            if new:
                self.requests[row.sequence_id].retract(row.known)
        verdict = Verdict(
            step=plan.step,
            tokens=tuple(tokens),
            proposed=drafted.proposed,
            proposals=drafted.proposals,
            fork_tokens=forks,
        )
        return result._replace(verdict=verdict, work=work)

    def _shape(self, plan: StepPlan, rows: int, drafted: DraftedStep) -> StepShape:
        keys = prompt_rows = 0
        for row in plan.scheduled:
            keys += row.end
            prompt_rows += row.num_rows + row.tap_rows - (row.drafts + 1 if row.samples else 0)
        return StepShape(len(plan.scheduled), rows, keys, drafted.fed, drafted.passes, prompt_rows)

    def _target_batch(self, scheduled: Sequence[ScheduledRequest]) -> Batch:
        spans = []
        for row in scheduled:
            request = self.requests[row.sequence_id]
            token_ids = request.tokens[row.first_position : row.known]
            if row.drafts:
                token_ids.extend(request.drafts[: row.drafts])
            spans.append(Span(request.table_row, row.first_position, token_ids, row.kept_from))
            if self._watch is not None:
                self._watch.target_rows(row)
        return self._batches.build(spans, self._layout.target_groups)

    def _sampled_rows(self, scheduled: Sequence[ScheduledRequest], first_rows: Sequence[int]) -> SampledRows:
        rows: list[int] = []
        draws: list[SampleRow] = []
        row_of_draw: list[int] = []
        for row, first in zip(scheduled, first_rows, strict=True):
            if not row.samples:
                continue
            request = self.requests[row.sequence_id]
            known = row.known
            at = first + known - 1 - row.first_position
            assumed = tuple(request.drafts[: row.drafts])
            row_of_draw.extend(range(len(rows), len(rows) + row.drafts + 1))
            draws.extend(request.sampling.rows(known, assumed))
            for sampling in request.forks if row.samples > 1 else ():
                row_of_draw.append(len(rows))
                draws.extend(sampling.rows(known))
            rows.extend(range(at, at + row.drafts + 1))
        return SampledRows(rows, draws, row_of_draw)

    def _sample(
        self,
        scheduled: Sequence[ScheduledRequest],
        first_rows: Sequence[int],
        wanted: SampledRows,
        output: DecoderOutput,
        result: StepResult,
    ) -> tuple[list[tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Samples the target's distribution at each sampled row, and accepts the drafts that agree. Returns the tokens
        that each request gains, and the first tokens of forks."""
        for row, first in zip(scheduled, first_rows, strict=True):
            request = self.requests[row.sequence_id]
            if request.prompt_logprobs is not None and row.start < request.record.prompt_len - 1:
                self._score_prompt(request, row, first, output.hidden, result)
        if not wanted.draws:
            return [() for _ in scheduled], {}
        logits, argmax = output.logits, output.argmax
        if logits is None:
            logits = self._decoder.logits(output.hidden[torch.tensor(wanted.rows, device=self.device)])
        if len(wanted.row_of_draw) > len(wanted.rows):
            logits, argmax = logits[torch.tensor(wanted.row_of_draw, device=self.device)], None
        sampled = self._sampler.sample(logits, wanted.draws, argmax=argmax)
        return self._verdicts(scheduled, sampled.tokens, sampled.logprobs, sampled.failed, result)

    def _verdicts(
        self,
        scheduled: Sequence[ScheduledRequest],
        sampled: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        failed: Mapping[int, OutriderError],
        result: StepResult,
    ) -> tuple[list[tuple[int, ...]], dict[str, tuple[int, ...]]]:
        tokens: list[tuple[int, ...]] = []
        forks: dict[str, tuple[int, ...]] = {}
        at = 0
        for row in scheduled:
            if not row.samples:
                tokens.append(())
                continue
            request = self.requests[row.sequence_id]
            stop = at + row.drafts + 1
            kept = accept(request.drafts[: row.drafts], sampled[at:stop])
            if kept[-1] == FAILED:
                result.failed[row.sequence_id] = failed[at + len(kept) - 1]
                # The request ends with this step; any token will do.
                kept = (*kept[:-1], 0)
            tokens.append(kept)
            scores = logprobs[at : at + len(kept)]
            if scores[0] is not None:
                result.logprobs[row.sequence_id] = [score for score in scores if score is not None]
            if row.samples > 1:
                end = stop + len(request.forks)
                forks[row.sequence_id] = tuple(max(token, 0) for token in sampled[stop:end])
                for number in range(stop, end):
                    if number in failed:
                        result.failed[row.sequence_id] = failed[number]
                result.fork_logprobs[row.sequence_id] = list(logprobs[stop:end])
                stop = end
            at = stop
        return tokens, forks

    def _score_prompt(
        self, request: RunningRequest, row: ScheduledRequest, first: int, hidden: Tensor, result: StepResult
    ) -> None:
        """Log-probabilities of the prompt tokens that follow this step's prompt rows."""
        assert request.prompt_logprobs is not None
        scores = result.prompt_logprobs.setdefault(request.id, [])
        count = request.prompt_logprobs
        stop = min(row.end, request.record.prompt_len - 1)
        for start in range(row.start, stop, ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, stop)
            at = first + start - row.first_position
            logits = self._decoder.logits(hidden[at : at + end - start])
            following = request.tokens[start + 1 : end + 1].tolist()
            entries = token_logprobs(logits, following, [count] * len(following))
            scores.extend(zip(range(start + 1, end + 1), entries, strict=True))

    def _append(self, scheduled: Sequence[ScheduledRequest], tokens: Sequence[tuple[int, ...]]) -> list[int]:
        """Appends what was sampled to the requests. Returns each request's v."""
        ends = []
        for row, new in zip(scheduled, tokens, strict=True):
            v = row.known + max(0, len(new) - 1)
            if new:
                self.requests[row.sequence_id].extend(new)
            if self._watch is not None:
                self._watch.accepted(row, v)
            ends.append(v)
        return ends
