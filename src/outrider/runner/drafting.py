"""The drafter's part of a step: it is fed what was committed, and proposes what the next step verifies.

Without a pace, every request gets the drafts that its row asks for. With one, what a request's grammar dictates and
what can be looked up costs no pass: the drafter is asked only where its drafts are expected to be worth more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.attention import PagedKV
from outrider.backends.base import Argmax
from outrider.backends.batch import BatchBuilder
from outrider.kv.footprint import Proposing
from outrider.kv.intervals import Interval
from outrider.kv.layout import KVLayout
from outrider.runner.request import RunningRequest
from outrider.runner.sampler import Sampler
from outrider.sanitizer.watch import StepWatch
from outrider.scheduler.pacing.pacer import Pace
from outrider.scheduler.pacing.worth import Calibration, Proposed, Source
from outrider.scheduler.plan import ScheduledRequest, StepPlan
from outrider.speculative.drafter import (
    DraftedRequest,
    Drafter,
    DraftServices,
    DrawRow,
    FeedRow,
    Proposal,
    ProposeRow,
    checked_proposals,
)
from outrider.speculative.lookup import Lookup
from outrider.speculative.vocabulary import DraftVocabulary

logger = logging.getLogger("outrider.engine")

CERTAIN = 0.999
"""The probability of a draft that a grammar dictates."""


class DraftedStep(NamedTuple):
    """What came of the drafter's part of a step."""

    proposed: tuple[int, ...]
    """For each scheduled request, how many drafts wait for verification."""
    proposals: dict[str, Proposed]
    """By sequence id, for requests whose drafts a pacer chooses."""
    fed: int
    passes: tuple[int, ...]
    drafter_s: float
    """Seconds that the drafter took."""


class FreeProposal(NamedTuple):
    """Drafts that took no pass of a drafter."""

    drafts: list[int]
    proposed: Proposed


class Drafting:
    def __init__(
        self,
        drafter: Drafter | None,
        layout: KVLayout,
        requests: Mapping[str, RunningRequest],
        sampler: Sampler,
        *,
        watch: StepWatch | None,
        least_confidence: float,
        calibration: Calibration | None,
        lookup: Lookup | None,
    ) -> None:
        self.least_confidence = least_confidence
        self.lookup = lookup
        self._drafter = drafter
        self._layout = layout
        self._footprint = layout.footprint
        self._requests = requests
        self._sampler = sampler
        self._backend = sampler.backend
        self._watch = watch
        self._calibration = calibration
        self._pace: Pace | None = None
        """That of the step which runs."""
        self._alternatives: dict[str, FreeProposal] = {}
        """By sequence id: what could be proposed instead of what the drafter is asked for in this step."""
        self._proposed_lengths: dict[str, int] = {}
        """By sequence id: how many drafts the drafter proposed in this step."""

    def bind(self, batches: BatchBuilder, kv: tuple[PagedKV, ...]) -> None:
        assert self._drafter is not None
        self._drafter.bind(
            DraftServices(
                batches=batches,
                groups=self._layout.draft_groups,
                kv=kv,
                draw=self._draw,
                worth_going_on=self._worth_going_on,
            )
        )

    def finish(self, request_id: str, salt: str, tokens: Sequence[int]) -> None:
        """Lets requests of the same salt copy from a text that is complete."""
        if self.lookup is not None:
            self.lookup.finish(request_id, salt, tokens)

    def forget_finished(self) -> None:
        """Forgets all texts that `finish` was told."""
        if self.lookup is not None:
            self.lookup.reset()

    def forget(self, request_id: str) -> None:
        if self.lookup is not None:
            self.lookup.forget(request_id)
        if self._drafter is not None:
            try:
                self._drafter.forget(request_id)
            # A drafter may come from another package. What it fails to forget is its own; requests end all the same.
            except Exception:
                logger.exception("the drafter %r failed to forget request %r", self._footprint.name, request_id)

    # ---- one step ----------------------------------------------------------------------------------

    def run(
        self,
        plan: StepPlan,
        first_rows: Sequence[int],
        ends: Sequence[int],
        tokens: Sequence[tuple[int, ...]],
        taps: Tensor,
    ) -> DraftedStep:
        """Feeds the drafter with what each request gained, and has it propose drafts for the next step. `ends` has each
        request's v."""
        self._pace = plan.pace
        self._alternatives.clear()
        self._proposed_lengths.clear()
        proposals: dict[str, Proposed] = {}
        asked = [
            self._asked(row, new, proposals) if row.samples else 0
            for row, new in zip(plan.scheduled, tokens, strict=True)
        ]
        feeds = self._feeds(plan.scheduled, first_rows, ends, tokens, asked)
        wanted = [
            ProposeRow(self._requests[row.sequence_id], v, k, self._tap_row(row, first, v))
            for row, first, v, k in zip(plan.scheduled, first_rows, ends, asked, strict=True)
            if k
        ]
        started_s = perf_counter()
        if feeds or wanted:
            self._ask_drafter(feeds, taps, wanted, proposals)
        drafter_s = perf_counter() - started_s
        return DraftedStep(
            tuple(len(self._requests[row.sequence_id].drafts) for row in plan.scheduled),
            proposals,
            sum(row.interval.size for row in feeds),
            self._passes(wanted),
            drafter_s,
        )

    def _tap_row(self, row: ScheduledRequest, first: int, v: int) -> int | None:
        return first + v - 1 - row.first_position if self._footprint.taps else None

    def _asked(self, row: ScheduledRequest, new: Sequence[int], proposals: dict[str, Proposed]) -> int:
        """Returns for how many drafts to ask the drafter, after proposing what costs no pass."""
        request = self._requests[row.sequence_id]
        # A request that has just ended needs no drafts.
        ended = not request.record.spec.stop_tokens.isdisjoint(new)
        k = 0 if ended else row.propose
        pace = self._pace if request.record.pace is not None else None
        if pace is not None and not ended:
            return self._asked_at_pace(request, k, pace, proposals)
        request.begin_drafting(k)
        if k and len(request.forced) == k and not self._footprint.keeps_accepted:
            request.propose([], self.least_confidence)
            return 0
        if k and self._footprint.passes(k) == 1:
            # A chain of passes ends by itself where it is unsure; a block is paid for as a whole.
            k = request.worth_asking(k)
        return k

    def _asked_at_pace(self, request: RunningRequest, k: int, pace: Pace, proposals: dict[str, Proposed]) -> int:
        """Returns for how many drafts to ask the drafter: for none where a cheaper proposal is worth as much."""
        record = request.record
        assert record.pace is not None
        most = min(max(k, pace.lookup), record.max_total - len(request.tokens) - 1)
        request.begin_drafting(most)
        found = self._without_pass(request, most)
        if found is None:
            return k
        # What a probe is for is the drafter's proposal.
        asks = record.pace.probing or pace.value(found.proposed.joint) < pace.drafter_value(record.pace)
        if k > len(request.forced) and asks:
            self._alternatives[request.id] = found
            return k
        request.drafts = found.drafts
        proposals[request.id] = found.proposed
        return 0

    def _without_pass(self, request: RunningRequest, most: int) -> FreeProposal | None:
        """Returns what the grammar dictates, or else what can be looked up; None if there is neither."""
        if request.forced:
            # The drafter would have to start with them too.
            certain = tuple(CERTAIN for _ in request.forced)
            return FreeProposal(request.forced, self._calibrated(request, Source.GRAMMAR, certain))
        pace = self._pace
        if self.lookup is None or pace is None or pace.lookup < 1 or most < 1 or pace.row_price >= CERTAIN:
            return None
        own = request.record.pace
        assert own is not None
        if not own.looks_up(pace):
            return None
        best, best_value = None, -1.0
        for match in self.lookup.find(request.id, request.salt, request.tokens, most):
            drafts = request.allowed(match.drafts)
            source = Source.SHARED_TEXT if match.shared else Source.OWN_TEXT
            probabilities = match.probabilities()[: len(drafts)]
            proposed = self._calibrated(request, source, probabilities, least=pace.least_joint)
            drafts, value = drafts[: len(proposed.joint)], pace.value(proposed.joint)
            if drafts and value > best_value:
                best, best_value = FreeProposal(drafts, proposed), value
        own.looked_up(best_value)
        return best

    def _calibrated(
        self, request: RunningRequest, source: Source, probabilities: Sequence[float], *, least: float = 0.0
    ) -> Proposed:
        """Corrects the probabilities of drafts as long as these are at least `least` likely to be accepted."""
        assert self._calibration is not None
        assert request.record.pace is not None
        shift = request.record.pace.shifts.by_source[source]
        joint = self._calibration.joint(source, probabilities, shift, least=least)
        return Proposed(source, tuple(probabilities[: len(joint)]), joint)

    def _feeds(
        self,
        scheduled: Sequence[ScheduledRequest],
        first_rows: Sequence[int],
        ends: Sequence[int],
        tokens: Sequence[tuple[int, ...]],
        asked: Sequence[int],
    ) -> list[FeedRow]:
        """Returns the durable slots that the drafter has to write for newly committed tokens, whatever k is."""
        feeds: list[FeedRow] = []
        for row, first, v, new, k in zip(scheduled, first_rows, ends, tokens, asked, strict=True):
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
                feeds.append(FeedRow(self._requests[row.sequence_id], fed, taps_at, k > 0))
        return feeds

    def _ask_drafter(
        self, feeds: Sequence[FeedRow], taps: Tensor, wanted: Sequence[ProposeRow], proposals: dict[str, Proposed]
    ) -> None:
        assert self._drafter is not None
        found = self._drafter.step(feeds, taps, wanted)
        checked = checked_proposals(self._footprint.name, found, wanted, vocab_size=self._sampler.vocab_size)
        for row, proposal in zip(wanted, checked, strict=True):
            request = self._requests[row.request.id]
            self._proposed_lengths[request.id] = len(proposal.drafts)
            self._take(request, proposal, proposals)
            if self._watch is not None and self._footprint.groups:
                self._watch.propose_reads(request.id, row.v)
                self._watch.propose_writes(request.id, row.v, proposal.drafts)

    def _take(self, request: RunningRequest, proposal: Proposal, proposals: dict[str, Proposed]) -> None:
        """Has the drafter's proposal verified, or what was found without it, if that turns out to be worth more."""
        pace = self._pace if request.record.pace is not None else None
        if pace is None:
            request.propose(proposal.drafts, self.least_confidence, proposal.probabilities)
            return
        given = proposal.probabilities
        probabilities = request.probabilities if given is None else list(given)
        request.propose(proposal.drafts, 0.0)
        count = len(request.drafts)
        # A drafter that says nothing of its drafts is as likely right as wrong, until it is known better.
        probabilities = [*probabilities[:count], *(0.5 for _ in range(count - len(probabilities)))]
        proposed = self._calibrated(request, Source.DRAFTER, probabilities)
        other = self._alternatives.pop(request.id, None)
        probing = request.record.pace is not None and request.record.pace.probing
        if other is not None and not probing and pace.value(other.proposed.joint) > pace.value(proposed.joint):
            request.drafts, proposed = other.drafts, other.proposed
        if request.drafts:
            proposals[request.id] = proposed

    def _passes(self, wanted: Sequence[ProposeRow]) -> tuple[int, ...]:
        """Returns the rows of each of the drafter's passes that proposed."""
        footprint = self._footprint
        if not wanted or footprint.proposing is Proposing.LOOKUP:
            return ()
        if footprint.proposing is Proposing.CHAIN:
            lengths = [max(1, self._proposed_lengths[row.request.id]) for row in wanted]
            return tuple(sum(length > place for length in lengths) for place in range(max(lengths)))
        return (sum(footprint.draft_rows(row.k) for row in wanted),)

    # ---- what the drafter asks for -----------------------------------------------------------------

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
            argmax = self._backend.argmax(logits)
        if self.least_confidence or self._calibration is not None:
            for row, probability in zip(rows, argmax.probabilities(), strict=True):
                request = self._requests[row.request.id]
                self._note_draft(request, probability if request.dictated(len(row.before)) is None else CERTAIN)
        if vocabulary.target_ids is not None:
            if all(self._requests[row.request.id].sampling.plain for row in rows):
                return vocabulary.ids(argmax.read()[0])
        dictated = [self._requests[row.request.id].dictated(len(row.before)) for row in rows]
        free = [number for number, token in enumerate(dictated) if token is None]
        if len(free) == len(rows):
            return self._draw_free(logits, rows, vocabulary, argmax)
        drawn: Iterator[int] = iter(())
        if free:
            free_logits = logits[torch.tensor(free, device=self._backend.device)]
            free_rows = [rows[number] for number in free]
            drawn = iter(self._draw_free(free_logits, free_rows, vocabulary, self._backend.argmax(free_logits)))
        return [next(drawn) if token is None else token for token in dictated]

    def _note_draft(self, request: RunningRequest, probability: float) -> None:
        """Notes how likely the next draft is, given that those before it are accepted."""
        pace = request.record.pace
        if pace is None or self._calibration is None:
            request.drafted(probability, probability)
        else:
            shift = pace.shifts.by_source[Source.DRAFTER]
            place = len(request.probabilities)
            corrected = self._calibration.conditional(Source.DRAFTER, place, probability, shift)
            request.drafted(probability, corrected)

    def _draw_free(
        self, logits: Tensor, rows: Sequence[DrawRow], vocabulary: DraftVocabulary, argmax: Argmax
    ) -> list[int]:
        """Draws the drafts that no grammar dictates."""
        draws = [self._requests[row.request.id].sampling.row_after(row.position, row.before) for row in rows]
        if vocabulary.target_ids is not None and all(draw.state.greedy and not draw.edited for draw in draws):
            return vocabulary.ids(argmax.read()[0])
        # A row that cannot be drawn gets a draft that will be rejected, or ends its request when it is verified.
        sampled = self._sampler.sample(vocabulary.spread(logits), draws, logprobs=False)
        return [max(token, 0) for token in sampled.tokens]

    def _worth_going_on(self, request: DraftedRequest) -> bool:
        running = self._requests[request.id]
        least = self.least_confidence
        if self._pace is not None and running.record.pace is not None:
            least = self._pace.going_on
        return running.confidence >= least
