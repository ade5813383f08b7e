"""A device that runs StepPlans on hashes instead of tensors: gather, compute, scatter, all through tables.

The order of a step is a runner's: page copies, target rows, verdict, feed, propose.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from outrider.kv.footprint import Proposing
from outrider.kv.intervals import Interval
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.pages import NULL_PAGE
from outrider.kv.plan import BlockTableLists
from outrider.kv.prefix import Media
from outrider.sanitizer import Sanitizer
from outrider.sanitizer.watch import StepWatch
from outrider.scheduler.pacing.pacer import Pace
from outrider.scheduler.pacing.worth import Source
from outrider.scheduler.plan import ScheduledRequest, StepPlan, Verdict
from outrider.tools.sim.oracle import EMPTY_SLOT, Reference, chance, digest
from outrider.tools.sim.paced import PacedRunner

UNLIKELY = 0.3
"""Probability that some drafts of a step are too unlikely to be verified."""


class DeviceRequest:
    """What a runner keeps of a request: its own copy of the tokens, and the drafts it proposed."""

    def __init__(self, prompt: Sequence[int], seed: int, reference: Reference) -> None:
        self.tokens = array("I", prompt)
        self.seed = seed
        self.reference = reference
        self.model = reference.model
        self.inputs = reference.inputs
        self.salt = ""
        self.drafts: list[int] = []


class FakeDevice:
    def __init__(
        self,
        layout: KVLayout,
        config: KVConfig,
        sanitizer: Sanitizer,
        *,
        acceptance: float,
        seed: int,
        on_stale_draft: Callable[[str, int], None],
        paced: PacedRunner | None = None,
    ) -> None:
        """`paced`: what drafts at the scheduler's pace; None if every request gets its k drafts."""
        self.layout = layout
        self.requests: dict[str, DeviceRequest] = {}
        self.memory: list[list[list[bytes]]] = []
        slots = [1] * len(config.arena_pages)
        for group, spec in enumerate(layout.groups):
            slots[layout.arena_of[group]] = max(slots[layout.arena_of[group]], spec.page_tokens)
        for arena, count in enumerate(config.arena_pages):
            self.memory.append([[EMPTY_SLOT] * slots[arena] for _ in range(count)])
        self._sanitizer = sanitizer
        self.tables = BlockTableLists(len(layout.groups))
        self._watch = StepWatch(layout, sanitizer, self.tables)
        self._acceptance = acceptance
        self._seed = seed
        self._on_stale_draft = on_stale_draft
        self._paced = paced

    # ---- requests ----------------------------------------------------------------------------------

    def add(
        self,
        request: str,
        device_request: DeviceRequest,
        namespace: tuple[str, str],
        media: tuple[Media, ...] = (),
    ) -> None:
        self.requests[request] = device_request
        device_request.salt = namespace[1]
        self._sanitizer.track(request, device_request.tokens, namespace, media)

    def forget(self, request: str) -> None:
        gone = self.requests.pop(request)
        self._sanitizer.forget(request)
        if self._paced is not None:
            self._paced.end(request, gone.salt, gone.tokens)

    # ---- one step ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> Verdict:
        plan.kv.apply_to(self.tables)
        self._watch.begin(plan)
        for copy in plan.kv.copies:
            memory = self.memory[self.layout.arena_of[copy.group]]
            memory[copy.destination][copy.first : copy.stop] = memory[copy.source][copy.first : copy.stop]
        if self._paced is not None:
            self._paced.begin()
        tokens: list[tuple[int, ...]] = []
        proposed: list[int] = []
        forks: dict[str, tuple[int, ...]] = {}
        for row in plan.scheduled:
            request = self.requests[row.sequence_id]
            sampled, taps, others = self._run_target(row, request)
            tokens.append(sampled)
            if others:
                forks[row.sequence_id] = others
            v, accepted = self._take_over(row, request, sampled)
            self._feed(row, request, v, accepted, taps)
            if (
                row.samples
                and plan.pace is not None
                and self._paced is not None
                and self._paced.is_paced(row.sequence_id)
            ):
                self._propose_at_pace(self._paced, plan.pace, row, request, v, taps)
            else:
                self._propose(row, request, v, taps)
            proposed.append(len(request.drafts))
        proposals = {} if self._paced is None else self._paced.proposals
        return Verdict(
            step=plan.step,
            tokens=tuple(tokens),
            proposed=tuple(proposed),
            proposals=proposals,
            fork_tokens=forks,
        )

    def _run_target(
        self, row: ScheduledRequest, request: DeviceRequest
    ) -> tuple[tuple[int, ...], dict[int, bytes], tuple[int, ...]]:
        """Run target rows in order. Returns the samples, the taps per position, and the first tokens of forks."""
        layout, model = self.layout, request.model
        known = row.known
        tables = [self.tables.table(row.sequence_id, g) for g in layout.target_groups]
        self._watch.target_rows(row)
        taps: dict[int, bytes] = {}
        sampled: list[int] = []
        others: tuple[int, ...] = ()
        still_right = True
        for position in range(row.first_position, row.end):
            token = request.tokens[position] if position < known else request.drafts[position - known]
            fed = request.inputs.at(position, token)
            context = digest(
                *(
                    self._gather(g, tables[g], Interval(layout.groups[g].kind.first_key(position), position))
                    for g in layout.target_groups
                )
            )
            if position >= row.kept_from:
                for group in layout.target_groups:
                    self._scatter(group, tables[group], position, model.target_slot(group, fed, context))
            taps[position] = model.tap(fed, context)
            if row.samples and position >= known - 1 and still_right:
                choice = model.next_token(fed, context, request.seed, position)
                sampled.append(choice)
                draft = position - known + 1
                still_right = draft < row.drafts and request.drafts[draft] == choice
            if row.samples > 1 and position == known - 1:
                others = tuple(
                    model.next_token(fed, context, fork_seed(request.seed, number), position)
                    for number in range(1, row.samples)
                )
        return tuple(sampled), taps, others

    def _take_over(self, row: ScheduledRequest, request: DeviceRequest, sampled: tuple[int, ...]) -> tuple[int, int]:
        """Append what was sampled; slots of accepted rows are durable now."""
        accepted = max(0, len(sampled) - 1)
        request.tokens.extend(sampled)
        v = row.known + accepted
        self._watch.accepted(row, v)
        return v, accepted

    # ---- the drafter -------------------------------------------------------------------------------

    def _feed(
        self, row: ScheduledRequest, request: DeviceRequest, v: int, accepted: int, taps: dict[int, bytes]
    ) -> None:
        """Write the durable slots of the drafter for newly committed tokens."""
        if not row.feeds:
            return
        layout, model, footprint = self.layout, request.model, self.layout.footprint
        interval = footprint.feed(durable_end=row.draft_end, v=v, accepted=accepted, proposed=row.proposed)
        kept = Interval(row.draft_end, interval.start)
        if row.feed_to is not None:
            interval = Interval(interval.start, min(interval.end, row.feed_to))
        tables = {g: self.tables.table(row.sequence_id, g) for g in layout.draft_groups}
        self._watch.feed(row, kept, interval)
        if self._paced is not None:
            self._paced.fed(interval.size)
        for position in range(interval.start, interval.end):
            if footprint.rebuild:
                own = self._draft_context(row.sequence_id, tables, position, position)
                fed = request.inputs.at(position, request.tokens[position])
                values = {g: model.token_slot(g, fed, own) for g in tables}
            else:
                later = request.inputs.between(request.tokens, position + 1, position + 1 + footprint.token_reach)
                values = {g: model.tapped_slot(g, taps.get(position, EMPTY_SLOT), later) for g in tables}
            for group, value in values.items():
                self._scatter(group, tables[group], position, value)

    def _draft_context(self, request: str, tables: dict[int, list[int]], query: int, end: int) -> bytes:
        parts = []
        for group, table in tables.items():
            first = max(self.tables.low(request, group), self.layout.groups[group].kind.first_key(query))
            parts.append(self._gather(group, table, Interval(first, end)))
        return digest(*parts)

    def _propose(self, row: ScheduledRequest, request: DeviceRequest, v: int, taps: dict[int, bytes]) -> None:
        """Gather, draft, write scratch."""
        k, footprint = row.propose, self.layout.footprint
        request.drafts = []
        if k == 0:
            return
        self._draft(row, request, v, k, taps)
        if footprint.groups:
            # What is too unlikely is not verified, though it left its scratch.
            unlikely = chance(self._seed, "unlikely", request.seed, v)
            if unlikely < UNLIKELY:
                del request.drafts[int(unlikely / UNLIKELY * (k + 1)) :]

    def _propose_at_pace(
        self,
        paced: PacedRunner,
        pace: Pace,
        row: ScheduledRequest,
        request: DeviceRequest,
        v: int,
        taps: dict[int, bytes],
    ) -> None:
        """Propose what the drafter finds, or what was found without it. In between, the drafter may have written
        scratch for drafts that are never verified."""
        request.drafts = []
        source = Source.DRAFTER
        free = paced.free_drafts(
            row, pace, request.salt, request.tokens, lambda position: self._draft_token(request, position, True)
        )
        if row.propose and (free is None or free.replaces):
            length = paced.length(row.sequence_id, pace, v, row.propose)
            self._draft(row, request, v, length, taps)
            paced.drafter_ran(row.propose, length)
        if free is not None:
            request.drafts, source = free.tokens, free.source
        paced.propose(row, source, v, len(request.drafts))

    def _draft(self, row: ScheduledRequest, request: DeviceRequest, v: int, k: int, taps: dict[int, bytes]) -> None:
        """Have the drafter propose k drafts; a look-up may find fewer."""
        footprint, right, tables = self.layout.footprint, True, {}
        if footprint.groups:
            tables = {g: self.tables.table(row.sequence_id, g) for g in self.layout.draft_groups}
            durable_end = footprint.durable_end(v)
            self._watch.propose_reads(row.sequence_id, v)
            lows = [self.tables.low(row.sequence_id, g) for g in range(len(self.layout.groups))]
            seen = self._draft_context(row.sequence_id, tables, v, durable_end)
            right = seen == request.reference.draft_context(v, lows)
        elif footprint.proposing is Proposing.HEADS:
            right = taps.get(v - 1) == request.reference.tap(v - 1)
        else:
            # A look-up may find fewer drafts than it was asked for.
            k = int(chance(self._seed, "found", request.seed, v) * (k + 1))
        if not right:
            self._on_stale_draft(row.sequence_id, v)
        request.drafts = [self._draft_token(request, v + 1 + number, right) for number in range(k)]
        if footprint.groups:
            self._write_scratch(row.sequence_id, request, tables, v, k)

    def _draft_token(self, request: DeviceRequest, position: int, right: bool) -> int:
        truth = request.reference.token(position)
        if right and chance(self._seed, "accept", request.seed, position) < self._acceptance:
            return truth
        return (truth + 1) % request.model.vocabulary

    def _write_scratch(self, name: str, request: DeviceRequest, tables: dict[int, list[int]], v: int, k: int) -> None:
        footprint = self.layout.footprint
        scratch = footprint.scratch(v, k)
        self._watch.propose_writes(name, v, request.drafts)
        for number, position in enumerate(range(scratch.start, scratch.end)):
            if footprint.rebuild:
                own = self._draft_context(name, tables, position, position)
                fed = request.inputs.at(position, request.drafts[number])
                values = {g: request.model.token_slot(g, fed, own) for g in tables}
            else:
                values = {g: digest(b"scratch", bytes([number])) for g in tables}
            for group, value in values.items():
                self._scatter(group, tables[group], position, value)

    # ---- memory ------------------------------------------------------------------------------------

    def _gather(self, group: int, table: list[int], interval: Interval) -> bytes:
        if interval.end <= interval.start:
            return b""
        size = self.layout.groups[group].page_tokens
        memory = self.memory[self.layout.arena_of[group]]
        first, last = interval.start // size, (interval.end - 1) // size
        if first == last:
            return b"".join(memory[table[first]][interval.start - first * size : interval.end - first * size])
        slots = memory[table[first]][interval.start - first * size : size]
        for number in range(first + 1, last):
            slots += memory[table[number]][:size]
        slots += memory[table[last]][: interval.end - last * size]
        return b"".join(slots)

    def _scatter(self, group: int, table: list[int], position: int, value: bytes) -> None:
        number, offset = divmod(position, self.layout.groups[group].page_tokens)
        # Past its table a real kernel would write somewhere; where the sanitizer only logs, so does this one.
        page = table[number] if number < len(table) else NULL_PAGE
        self.memory[self.layout.arena_of[group]][page][offset] = value


def fork_seed(seed: int, number: int) -> int:
    """Returns the sampler's seed of a further continuation."""
    return seed * 1_000 + number
