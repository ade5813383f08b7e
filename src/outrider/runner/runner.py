"""Carries out step plans: page copies, target rows, verdict, feed, propose; in this order, batched over requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Argmax, Backend
from outrider.backends.batch import Batch, Span
from outrider.errors import OutriderError
from outrider.kv.intervals import Interval
from outrider.kv.layout import KVConfig, KVLayout
from outrider.models.decoder import Decoder, DecoderOutput
from outrider.models.kv_groups import LayerGroups
from outrider.runner.logprobs import ROWS_AT_ONCE
from outrider.runner.page_store import PageStore
from outrider.runner.request import RunningRequest
from outrider.runner.sampler import FAILED, Sampler, SampleRow, TokenLogprobs, token_logprobs
from outrider.runner.tables import BlockTables, SequenceTables
from outrider.sanitizer import Sanitizer
from outrider.sanitizer.watch import StepWatch
from outrider.scheduler.plan import ScheduledRequest, StepPlan, Verdict
from outrider.speculative.drafter import (
    DraftedRequest,
    Drafter,
    DraftServices,
    DrawRow,
    FeedRow,
    ProposeRow,
    checked_proposals,
)
from outrider.speculative.verify import accept
from outrider.speculative.vocabulary import DraftVocabulary

logger = logging.getLogger("outrider.engine")


class StepResult(NamedTuple):
    verdict: Verdict
    logprobs: dict[str, list[TokenLogprobs]]
    """For requests that asked: one entry per token of the verdict."""
    fork_logprobs: dict[str, list[TokenLogprobs | None]]
    prompt_logprobs: dict[str, list[tuple[int, TokenLogprobs]]]
    """(position, …) of prompt tokens, as their rows ran."""
    failed: dict[str, OutriderError]
    """By sequence id: why no token could be chosen. A RequestError means that the request's own settings forbid all."""


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
    ) -> None:
        """`least_confidence`: drafts are verified only while their joint probability, by the drafter's own estimate, is
        at least this; 0 verifies all of them."""
        self.least_confidence = least_confidence
        self.backend: Backend = target.backend
        self.device = self.backend.device
        self._drafter = drafter
        self._layout = layout
        self._footprint = layout.footprint
        self.requests: dict[str, RunningRequest] = {}
        owners: tuple[LayerGroups, ...] = (target_groups,)
        if drafter is not None and drafter.layer_groups is not None:
            owners += (drafter.layer_groups,)
        self.owners = owners
        """The target's layers, then the drafter's if it has any, in the order of the layout's groups."""
        self.store = PageStore(layout, config.arena_pages, owners, dtype=kv_dtype, backend=self.backend)
        self._tables = BlockTables(layout, max_model_len=config.max_model_len, device=self.device)
        self._batches = self.backend.batch_builder(layout, self._tables)
        self._decoder = target
        self._target = target.bind(self.store.layers(target_groups, 0), target_groups)
        self._sampler = Sampler(target.spec.vocab_size, self.backend)
        self._watch = StepWatch(layout, sanitizer, SequenceTables(self._tables)) if sanitizer is not None else None
        if drafter is not None:
            groups = layout.draft_groups
            kv = self.store.layers(drafter.layer_groups, groups.start) if drafter.layer_groups is not None else ()
            drafter.bind(
                DraftServices(
                    batches=self._batches,
                    groups=groups,
                    kv=kv,
                    draw=self._draw,
                    worth_going_on=self._worth_going_on,
                )
            )

    def add(self, request: RunningRequest) -> None:
        self.requests[request.id] = request

    def forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        if self._drafter is not None:
            try:
                self._drafter.forget(request_id)
            # A drafter may come from another package. What it fails to forget is its own; requests end all the same.
            except Exception:
                logger.exception("the drafter %r failed to forget request %r", self._footprint.name, request_id)

    # ---- one step ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode(), self.backend.step():
            return self._run(plan)

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
        batch = self._target_batch(plan.scheduled)
        sampled = self._sampled_rows(plan.scheduled, batch.first_rows)
        output = self._target.forward(batch, taps=self._footprint.taps, scored=sampled.contiguous)
        tokens, forks = self._sample(plan.scheduled, batch.first_rows, sampled, output, result)
        ends = self._append(plan.scheduled, tokens)
        feeds = self._feeds(plan.scheduled, batch.first_rows, ends, tokens)
        proposed = self._propose(plan.scheduled, batch.first_rows, ends, tokens, feeds, output.taps)
        for row, new in zip(plan.scheduled, tokens, strict=True):
            if new:
                self.requests[row.sequence_id].retract(row.known)
        verdict = Verdict(step=plan.step, tokens=tuple(tokens), proposed=proposed, fork_tokens=forks)
        return result._replace(verdict=verdict)

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

    # ---- the drafter -------------------------------------------------------------------------------

    def _feeds(
        self,
        scheduled: Sequence[ScheduledRequest],
        first_rows: Sequence[int],
        ends: Sequence[int],
        tokens: Sequence[tuple[int, ...]],
    ) -> list[FeedRow]:
        """Returns the durable slots that the drafter has to write for newly committed tokens, whatever k is."""
        feeds: list[FeedRow] = []
        for row, first, v, new in zip(scheduled, first_rows, ends, tokens, strict=True):
            if not row.feeds:
                continue
            fed = self._footprint.feed(
                durable_end=row.draft_end, v=v, accepted=max(0, len(new) - 1), proposed=row.proposed
            )
            kept = Interval(row.draft_end, fed.start)
            if row.feed_to is not None:
                fed = Interval(fed.start, min(fed.end, row.feed_to))
            if self._watch is not None:
                self._watch.feed(row, kept, fed)
            if not fed.empty:
                taps_at = first + fed.start - row.first_position
                feeds.append(FeedRow(self.requests[row.sequence_id], fed, taps_at, row.propose > 0))
        return feeds

    def _propose(
        self,
        scheduled: Sequence[ScheduledRequest],
        first_rows: Sequence[int],
        ends: Sequence[int],
        tokens: Sequence[tuple[int, ...]],
        feeds: Sequence[FeedRow],
        taps: Tensor,
    ) -> tuple[int, ...]:
        """Feeds the drafter, and has it propose drafts for the next step. Returns how many each request got."""
        wanted: list[ProposeRow] = []
        for row, first, v, new in zip(scheduled, first_rows, ends, tokens, strict=True):
            request = self.requests[row.sequence_id]
            # A request that has just ended needs no drafts.
            k = row.propose if request.record.spec.stop_tokens.isdisjoint(new) else 0
            request.begin_drafting(k)
            if k and len(request.forced) == k and not self._footprint.keeps_accepted:
                request.propose([], self.least_confidence)
            elif k:
                if self._footprint.passes(k) == 1:
                    # A chain of passes ends by itself where it is unsure; a block is paid for as a whole.
                    k = request.worth_asking(k)
                tap_row = first + v - 1 - row.first_position if self._footprint.taps else None
                wanted.append(ProposeRow(request, v, k, tap_row))
        if feeds or wanted:
            assert self._drafter is not None
            found = self._drafter.step(feeds, taps, wanted)
            proposals = checked_proposals(self._footprint.name, found, wanted, vocab_size=self._sampler.vocab_size)
            for row_wanted, proposal in zip(wanted, proposals, strict=True):
                name = row_wanted.request.id
                self.requests[name].propose(proposal.drafts, self.least_confidence, proposal.probabilities)
                if self._watch is not None and self._footprint.groups:
                    self._watch.propose_reads(name, row_wanted.v)
                    self._watch.propose_writes(name, row_wanted.v, proposal.drafts)
        return tuple(len(self.requests[row.sequence_id].drafts) for row in scheduled)

    def _draw(
        self,
        logits: Tensor,
        rows: Sequence[DrawRow],
        vocabulary: DraftVocabulary,
        argmax: Argmax | None = None,
    ) -> list[int]:
        """Draws drafts with the target's processors and noise, so that they agree as often as they can. `argmax`: that
        of the logits, where it is known already."""
        if argmax is None:
            argmax = self.backend.argmax(logits)
        if self.least_confidence:
            for row, probability in zip(rows, argmax.probabilities(), strict=True):
                request = self.requests[row.request.id]
                request.drafted(probability if request.dictated(len(row.before)) is None else 1.0)
        if vocabulary.target_ids is not None:
            if all(self.requests[row.request.id].sampling.plain for row in rows):
                return vocabulary.ids(argmax.read()[0])
        dictated = [self.requests[row.request.id].dictated(len(row.before)) for row in rows]
        free = [number for number, token in enumerate(dictated) if token is None]
        if len(free) == len(rows):
            return self._draw_free(logits, rows, vocabulary, argmax)
        drawn: Iterator[int] = iter(())
        if free:
            free_logits = logits[torch.tensor(free, device=self.device)]
            free_rows = [rows[number] for number in free]
            drawn = iter(self._draw_free(free_logits, free_rows, vocabulary, self.backend.argmax(free_logits)))
        return [next(drawn) if token is None else token for token in dictated]

    def _draw_free(
        self, logits: Tensor, rows: Sequence[DrawRow], vocabulary: DraftVocabulary, argmax: Argmax
    ) -> list[int]:
        """Draws the drafts that no grammar dictates."""
        draws = [self.requests[row.request.id].sampling.row_after(row.position, row.before) for row in rows]
        if vocabulary.target_ids is not None and all(draw.state.greedy and not draw.edited for draw in draws):
            return vocabulary.ids(argmax.read()[0])
        # A row that cannot be drawn gets a draft that will be rejected, or ends its request when it is verified.
        sampled = self._sampler.sample(vocabulary.spread(logits), draws, logprobs=False)
        return [max(token, 0) for token in sampled.tokens]

    def _worth_going_on(self, request: DraftedRequest) -> bool:
        return self.requests[request.id].confidence >= self.least_confidence
