"""Carries out step plans: page copies, target rows, verdict, feed, propose; in this order, batched over requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.kv.intervals import Interval
from outrider.kv.layout import KVConfig, KVLayout
from outrider.layers.ops import Greatest, Ops
from outrider.layers.rows import Rows, Span
from outrider.layers.torch_threads import torch_threads
from outrider.models.decoder import Decoder, Hidden, LayerPlaces
from outrider.models.kv_groups import LayerGroups
from outrider.runner.batch import Batcher
from outrider.runner.confidence import largest_shares
from outrider.runner.logprobs import ROWS_AT_ONCE
from outrider.runner.page_store import PageStore
from outrider.runner.request import RunningRequest
from outrider.runner.sampler import FAILED, Sampler, SampleRow, TokenLogprobs, largest, token_logprobs
from outrider.runner.tables import TableLines
from outrider.sanitizer import Sanitizer
from outrider.sanitizer.watch import StepWatch
from outrider.scheduler.plan import StepPlan, StepRow, Verdict
from outrider.speculative.drafter import DraftedRequest, Drafter, DraftServices, DrawRow, FeedRow, ProposeRow
from outrider.speculative.verify import accept
from outrider.speculative.vocabulary import DraftVocabulary


class StepResult(NamedTuple):
    verdict: Verdict
    logprobs: dict[str, list[TokenLogprobs]]
    """For requests that asked: one entry per token of the verdict, forks under their first token's request."""
    fork_logprobs: dict[str, list[TokenLogprobs | None]]
    prompt_logprobs: dict[str, list[tuple[int, TokenLogprobs]]]
    """(position, …) of prompt tokens, as their rows ran."""
    failed: dict[str, str]
    """Requests whose logits are not numbers, and what to tell their owners."""


NO_VERDICT = Verdict(step=-1, tokens=(), proposed=())
"""Until there is one."""


class Wanted(NamedTuple):
    """What a step samples."""

    places: list[int]
    """Rows whose logits are wanted."""
    draws: list[SampleRow]
    spread: list[int]
    """Per draw: which of `places`."""

    @property
    def together(self) -> tuple[int, int] | None:
        """The rows [first, end), if the places lie side by side."""
        places = self.places
        if not places or places[-1] - places[0] >= len(places):
            return None
        return places[0], places[-1] + 1


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
        device: torch.device,
        sanitizer: Sanitizer | None = None,
        least_confidence: float = 0.0,
    ) -> None:
        """`least_confidence`: drafts are verified only as far as the drafter finds all of them together at least so
        likely; 0: all of them."""
        self.least_confidence = least_confidence
        self._target = target
        self._drafter = drafter
        self._layout = layout
        self._footprint = layout.footprint
        self.requests: dict[str, RunningRequest] = {}
        owners: tuple[LayerGroups, ...] = (target_groups,)
        if drafter is not None and drafter.layer_groups is not None:
            owners += (drafter.layer_groups,)
        self.owners = owners
        """The target's layers, then the drafter's if it has any, in the order of the layout's groups."""
        self.store = PageStore(layout, config.arena_pages, owners, dtype=kv_dtype, device=device)
        self._tables = TableLines(layout, max_model_len=config.max_model_len, device=device)
        self._batcher = Batcher(layout, self._tables, device)
        self._places = LayerPlaces(self.store.layers(target_groups, 0), target_groups)
        self._sampler = Sampler(target.spec.vocab_size, device)
        self.device = device
        self._watch = StepWatch(layout, sanitizer) if sanitizer is not None else None
        if drafter is not None:
            groups = layout.draft_groups
            kv = self.store.layers(drafter.layer_groups, groups.start) if drafter.layer_groups is not None else ()
            drafter.bind(
                DraftServices(
                    rows=self._batcher,
                    groups=groups,
                    kv=kv,
                    draw=self._draw,
                    weighs=lambda: self.least_confidence > 0,
                    worth_going_on=self._worth_going_on,
                )
            )

    @property
    def ops(self) -> Ops:
        return self._target.ops

    def add(self, request: RunningRequest) -> None:
        self.requests[request.id] = request

    def forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        if self._drafter is not None:
            self._drafter.forget(request_id)

    # ---- one step ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode(), torch_threads(1) if self.ops.own_threads else nullcontext():
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        self._tables.apply(plan.kv)
        if self._watch is not None:
            self._watch.begin(plan)
        self.store.copy(plan.kv.copies)
        result = StepResult(NO_VERDICT, {}, {}, {}, {})
        if not plan.rows:
            return result._replace(verdict=Verdict(step=plan.step, tokens=(), proposed=()))
        for row in plan.rows:
            self.requests[row.request].line = self._tables.line(row.request)
        rows = self._target_rows(plan.rows)
        wanted = self._wanted(plan.rows, rows.first_row)
        hidden = self._run_target(rows, wanted.together)
        tokens, forks = self._sample(plan.rows, rows.first_row, wanted, hidden, result)
        ends = self._take_over(plan.rows, tokens)
        feeds = self._feeds(plan.rows, rows.first_row, ends, tokens)
        proposed = self._propose(plan.rows, ends, tokens, feeds, hidden.taps)
        verdict = Verdict(step=plan.step, tokens=tuple(tokens), proposed=proposed, fork_tokens=forks)
        return StepResult(verdict, *result[1:])

    def _target_rows(self, step_rows: Sequence[StepRow]) -> Rows:
        spans = []
        for row in step_rows:
            request = self.requests[row.request]
            first, known = row.start - row.tap_rows, row.start + row.num_rows - row.drafts
            tokens = request.tokens[first:known]
            if row.drafts:
                tokens.extend(request.drafts[: row.drafts])
            spans.append(Span(line=request.line, start=first, tokens=tokens, kept_from=row.kept_from))
            if self._watch is not None:
                self._watch.target_rows(row)
        return self._batcher.rows(spans, self._layout.target_groups)

    def _run_target(self, rows: Rows, scored: tuple[int, int] | None) -> Hidden:
        return self._target.forward(rows.tokens, self._places.of(rows), taps=self._footprint.taps, scored=scored)

    def _wanted(self, step_rows: Sequence[StepRow], first_row: Sequence[int]) -> Wanted:
        places: list[int] = []
        draws: list[SampleRow] = []
        spread: list[int] = []
        for row, first in zip(step_rows, first_row, strict=True):
            if not row.samples:
                continue
            request = self.requests[row.request]
            known = row.start + row.num_rows - row.drafts
            at = first + known - 1 - (row.start - row.tap_rows)
            assumed = tuple(request.drafts[: row.drafts])
            spread.extend(range(len(places), len(places) + row.drafts + 1))
            draws.extend(request.sampling.rows(known, assumed))
            for sampling in request.forks if row.samples > 1 else ():
                spread.append(len(places))
                draws.extend(sampling.rows(known))
            places.extend(range(at, at + row.drafts + 1))
        return Wanted(places, draws, spread)

    def _sample(
        self,
        step_rows: Sequence[StepRow],
        first_row: Sequence[int],
        wanted: Wanted,
        hidden: Hidden,
        result: StepResult,
    ) -> tuple[list[tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """What the target says at each sampled row, and how many drafts agree with it."""
        for row, first in zip(step_rows, first_row, strict=True):
            request = self.requests[row.request]
            if request.prompt_logprobs is not None and row.start < request.prompt_len - 1:
                self._score_prompt(request, row, first, hidden.final, result)
        if not wanted.draws:
            return [() for _ in step_rows], {}
        logits, found = hidden.logits, hidden.greatest
        if logits is None:
            logits = self._target.logits(hidden.final[torch.tensor(wanted.places, device=self.device)])
        if len(wanted.spread) > len(wanted.places):
            logits, found = logits[torch.tensor(wanted.spread, device=self.device)], None
        sampled = self._sampler.sample(logits, wanted.draws, found=found)
        return self._verdicts(step_rows, sampled.tokens, sampled.logprobs, sampled.failed, result)

    def _verdicts(
        self,
        step_rows: Sequence[StepRow],
        sampled: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        failed: Mapping[int, RequestError],
        result: StepResult,
    ) -> tuple[list[tuple[int, ...]], dict[str, tuple[int, ...]]]:
        tokens: list[tuple[int, ...]] = []
        forks: dict[str, tuple[int, ...]] = {}
        at = 0
        for row in step_rows:
            if not row.samples:
                tokens.append(())
                continue
            request = self.requests[row.request]
            stop = at + row.drafts + 1
            kept = accept(request.drafts[: row.drafts], sampled[at:stop])
            if kept[-1] == FAILED:
                result.failed[row.request] = str(failed[at + len(kept) - 1])
                # The request ends with this step; any token will do.
                kept = (*kept[:-1], 0)
            tokens.append(kept)
            scores = logprobs[at : at + len(kept)]
            if scores[0] is not None:
                result.logprobs[row.request] = [score for score in scores if score is not None]
            if row.samples > 1:
                end = stop + len(request.forks)
                forks[row.request] = tuple(max(token, 0) for token in sampled[stop:end])
                for number in range(stop, end):
                    if number in failed:
                        result.failed[row.request] = str(failed[number])
                result.fork_logprobs[row.request] = list(logprobs[stop:end])
                stop = end
            at = stop
        return tokens, forks

    def _score_prompt(
        self, request: RunningRequest, row: StepRow, first: int, hidden: Tensor, result: StepResult
    ) -> None:
        """Log-probabilities of the prompt tokens that follow this step's prompt rows."""
        assert request.prompt_logprobs is not None
        scores = result.prompt_logprobs.setdefault(request.id, [])
        count = request.prompt_logprobs
        stop = min(row.start + row.num_rows, request.prompt_len - 1)
        for start in range(row.start, stop, ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, stop)
            at = first + start - (row.start - row.tap_rows)
            logits = self._target.logits(hidden[at : at + end - start])
            following = request.tokens[start + 1 : end + 1].tolist()
            entries = token_logprobs(logits, following, [count] * len(following))
            scores.extend(zip(range(start + 1, end + 1), entries, strict=True))

    def _take_over(self, step_rows: Sequence[StepRow], tokens: Sequence[tuple[int, ...]]) -> list[int]:
        """Append what was sampled; returns each row's v."""
        ends = []
        for row, new in zip(step_rows, tokens, strict=True):
            known = row.start + row.num_rows - row.drafts
            v = known + max(0, len(new) - 1)
            if new:
                self.requests[row.request].take(new)
            if self._watch is not None:
                self._watch.accepted(row, v)
            ends.append(v)
        return ends

    # ---- the drafter -------------------------------------------------------------------------------

    def _feeds(
        self,
        step_rows: Sequence[StepRow],
        first_row: Sequence[int],
        ends: Sequence[int],
        tokens: Sequence[tuple[int, ...]],
    ) -> list[FeedRow]:
        """The durable slots that the drafter has to write for newly committed tokens, whatever k is."""
        feeds: list[FeedRow] = []
        for row, first, v, new in zip(step_rows, first_row, ends, tokens, strict=True):
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
                taps_at = first + fed.start - (row.start - row.tap_rows)
                feeds.append(FeedRow(self.requests[row.request], fed, taps_at, row.propose > 0))
        return feeds

    def _propose(
        self,
        step_rows: Sequence[StepRow],
        ends: Sequence[int],
        tokens: Sequence[tuple[int, ...]],
        feeds: Sequence[FeedRow],
        taps: Tensor,
    ) -> tuple[int, ...]:
        """Have the drafter fed, and drafts made for the next step; returns how many each row got."""
        wanted: list[ProposeRow] = []
        for row, v, new in zip(step_rows, ends, tokens, strict=True):
            request = self.requests[row.request]
            request.begin_drafting()
            # A request that has just ended needs none.
            if row.propose and request.stop_tokens.isdisjoint(new):
                k = row.propose
                if self._footprint.passes(k) == 1:
                    # A chain of passes ends by itself where it is unsure; a block is paid for as a whole.
                    k = request.worth_asking(k)
                wanted.append(ProposeRow(request, v, k))
        if feeds or wanted:
            assert self._drafter is not None
            for row_wanted, drafts in zip(wanted, self._drafter.step(feeds, taps, wanted), strict=True):
                name = row_wanted.request.id
                self.requests[name].propose(drafts, self.least_confidence)
                if self._watch is not None and self._footprint.groups:
                    self._watch.propose_reads(name, row_wanted.v)
                    self._watch.propose_writes(name, row_wanted.v, drafts)
        return tuple(len(self.requests[row.request].drafts) for row in step_rows)

    def _draw(
        self,
        logits: Tensor,
        rows: Sequence[DrawRow],
        vocabulary: DraftVocabulary,
        found: Greatest | None = None,
    ) -> list[int]:
        """Drafts are drawn with the target's processors and noise, so that they agree as often as they can. `found`:
        the largest of these logits, where somebody has looked already."""
        if self.least_confidence:
            shares = None if found is None else found.shares()
            for row, share in zip(rows, shares or largest_shares(logits, self.ops), strict=True):
                self.requests[row.request.id].drafted(share)
        if found is not None and vocabulary.target_ids is not None:
            if all(self.requests[row.request.id].sampling.plain for row in rows):
                return vocabulary.ids(found.read()[0])
        draws = [self.requests[row.request.id].sampling.row_after(row.position, row.before) for row in rows]
        if vocabulary.target_ids is not None and all(draw.state.greedy and not draw.edited for draw in draws):
            return vocabulary.ids(largest(logits)[0])
        # A row that cannot be drawn gets a draft that will be rejected, or ends its request when it is verified.
        sampled = self._sampler.sample(vocabulary.spread(logits), draws, logprobs=False)
        return [max(token, 0) for token in sampled.tokens]

    def _worth_going_on(self, request: DraftedRequest) -> bool:
        return self.requests[request.id].confidence >= self.least_confidence
