"""What a step reads and writes, told to the sanitizer from the plan, the footprint and the runner's block tables.

Everything that runs steps calls this, on real memory or simulated. What a kernel really does is not seen here; level
`bytes` covers that.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.kv.intervals import Interval
from outrider.kv.layout import KVLayout
from outrider.kv.plan import TableReader
from outrider.sanitizer.checks import Sanitizer
from outrider.scheduler.plan import ScheduledRequest, StepPlan


class StepWatch:
    def __init__(self, layout: KVLayout, sanitizer: Sanitizer, tables: TableReader) -> None:
        self._layout = layout
        self._steps = sanitizer.steps
        self._tables = tables

    def begin(self, plan: StepPlan) -> None:
        """Start a step whose changes the block tables already show."""
        self._steps.begin(plan.step)
        for copy in plan.kv.copies:
            self._steps.copied(copy)

    def target_rows(self, row: ScheduledRequest) -> None:
        for group in self._layout.target_groups:
            table = self._tables.table(row.sequence_id, group)
            start = self._layout.groups[group].kind.first_key(row.first_position)
            # Below row.start everything is durable; from there on it is this step's own.
            self._steps.read(row.sequence_id, group, Interval(start, row.start), table, scratch_from=row.start)
            self._steps.write(row.sequence_id, group, Interval(row.kept_from, row.end), table, "target rows")

    def accepted(self, row: ScheduledRequest, v: int) -> None:
        """Note that the slots of accepted rows are durable now."""
        for group in self._layout.target_groups:
            table = self._tables.table(row.sequence_id, group)
            self._steps.became_durable(row.sequence_id, group, Interval(row.start, v), table, keep=False)

    def feed(self, row: ScheduledRequest, kept: Interval, fed: Interval) -> None:
        layout, footprint = self._layout, self._layout.footprint
        rows = Interval(row.first_position, row.end)
        for group in layout.draft_groups:
            table = self._tables.table(row.sequence_id, group)
            self._steps.became_durable(row.sequence_id, group, kept, table, keep=True)
            if footprint.feed_reads_kv:
                start = self._first_key(row.sequence_id, group, fed.start)
                self._steps.read(row.sequence_id, group, Interval(start, fed.start), table, scratch_from=fed.start)
            self._steps.fed(row.sequence_id, group, fed, table, rows=rows)

    def propose_reads(self, request: str, v: int) -> None:
        durable_end = self._layout.footprint.durable_end(v)
        for group in self._layout.draft_groups:
            interval = Interval(self._first_key(request, group, v), durable_end)
            self._steps.read(request, group, interval, self._tables.table(request, group), scratch_from=durable_end)

    def propose_writes(self, request: str, v: int, drafts: Sequence[int]) -> None:
        footprint = self._layout.footprint
        scratch = footprint.scratch(v, len(drafts))
        ids = None
        if footprint.keeps_accepted:
            ids = self._steps.draft_identities(request, scratch.start, drafts[: scratch.size])
        for group in self._layout.draft_groups:
            self._steps.write(request, group, scratch, self._tables.table(request, group), "propose", ids=ids)

    def _first_key(self, request: str, group: int, query: int) -> int:
        return max(self._tables.low(request, group), self._layout.groups[group].kind.first_key(query))
