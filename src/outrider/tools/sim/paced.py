"""A simulated worker whose scheduler paces: what its runner proposes, and how long its steps seem to take.

The scheduler has a real pacer. Its steps cost what a hash says, with other prices every few steps, and now and then a
number of drafts is forced on it, so that what is verified and proposed changes all the time. Drafts come from the
drafter, from a grammar, or from a real look-up, which may find more than was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.errors import InvariantViolation
from outrider.kv.footprint import KVFootprint, Proposing
from outrider.scheduler.pacing.costs import StepShape, StepTimes
from outrider.scheduler.pacing.pacer import Pace, Pacer
from outrider.scheduler.pacing.worth import Proposed, Source
from outrider.scheduler.plan import ScheduledRequest, StepPlan
from outrider.scheduler.request import Request
from outrider.speculative.lookup import Lookup, LookupConfig, Match
from outrider.tools.sim.oracle import chance

MOST_LOOKED_UP = 9
"""More than any request's k, so that look-ups find more than a drafter is asked for."""
STEPS_OF_A_PRICE = 5
"""Number of steps after which rows and passes cost something else."""
PRICES = (0.005, 0.05, 0.3, 1.0)
"""What a row or a pass costs, in terms of the fixed part of a step."""
FORCED = 0.2
"""Probability that numbers of drafts are forced on a step."""
DICTATED, LOOKED_UP = 0.15, 0.7
"""Up to which chance drafts are dictated by a grammar, and up to which they are looked up."""
REPLACED = 0.5
"""Probability that the drafter is asked all the same, and that its drafts are replaced afterwards."""
FINISHED = 0.8
"""Probability that a text which ends may be copied from."""
LOOKUP = LookupConfig(shortest_match=1, shortest_shared_match=2, longest_match=8, most_shared_tokens=2_000)


class FreeDrafts(NamedTuple):
    """Drafts that took no pass of the drafter."""

    source: Source
    tokens: list[int]
    replaces: bool
    """Whether the drafter proposes too, before these drafts take the place of what it found."""


class PacedRunner:
    """The part of a runner that drafts at a pace."""

    def __init__(self, seed: int, pacer: Pacer, footprint: KVFootprint, counts: Counter[str]) -> None:
        self.pacer = pacer
        self.proposals: dict[str, Proposed] = {}
        """By sequence id: the drafts of the step that runs."""
        self.record_of: Callable[[str], Request | None] = lambda sequence_id: None
        self._seed = seed
        self._footprint = footprint
        self._counts = counts
        self._lookup = Lookup(LOOKUP)
        self._finished: dict[str, list[tuple[int, ...]]] = {}
        """By salt: the texts that requests may copy from."""
        self._fed = 0
        self._lengths: list[tuple[int, int]] = []
        """(drafts asked for, drafts found) of each proposal of the drafter in this step."""

    # ---- texts ---------------------------------------------------------------------------------------

    def end(self, sequence: str, salt: str, tokens: Sequence[int]) -> None:
        """Has other requests copy from a text that ended, or not."""
        if chance(self._seed, "finished", sequence) < FINISHED:
            self._lookup.finish(sequence, salt, tokens)
            self._finished.setdefault(salt, []).append(tuple(tokens))
        else:
            self._lookup.forget(sequence)

    def reset(self) -> None:
        """Forgets all finished texts, as a reset of the prefix cache does."""
        self._lookup.reset()
        self._finished.clear()

    # ---- drafts --------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.proposals = {}
        self._fed, self._lengths = 0, []

    def is_paced(self, sequence: str) -> bool:
        record = self.record_of(sequence)
        return record is not None and record.pace is not None

    def free_drafts(
        self, row: ScheduledRequest, pace: Pace, salt: str, tokens: Sequence[int], draft: Callable[[int], int]
    ) -> FreeDrafts | None:
        """Returns drafts of a paced request that need no drafter, or None if there are none. `draft` gives the draft
        of a position by which texts go on as often as the scenario's drafters are right."""
        record = self.record_of(row.sequence_id)
        assert record is not None
        v = len(tokens) - 1
        most = min(max(row.propose, pace.lookup), record.max_total - len(tokens) - 1)
        kind = chance(self._seed, "source", row.sequence_id, v)
        if most < 1 or kind >= LOOKED_UP:
            return None
        replaces = row.propose > 0 and chance(self._seed, "replaced", row.sequence_id, v) < REPLACED
        if kind < DICTATED:
            count = 1 + int(chance(self._seed, "dictated", row.sequence_id, v) * most)
            return FreeDrafts(Source.GRAMMAR, [draft(v + 1 + number) for number in range(count)], replaces)
        matches = self._lookup.find(row.sequence_id, salt, tokens, most)
        for match in matches:
            if match.shared:
                self._check_tenant(row.sequence_id, salt, match, tokens)
            self._counts["looked_up_in_shared_text" if match.shared else "looked_up_in_own_text"] += 1
        if not matches:
            return None
        match = matches[int(chance(self._seed, "match", row.sequence_id, v) * len(matches))]
        return FreeDrafts(Source.SHARED_TEXT if match.shared else Source.OWN_TEXT, match.drafts, replaces)

    def _check_tenant(self, sequence: str, salt: str, match: Match, tokens: Sequence[int]) -> None:
        """I11: a draft that is looked up in another text comes from a finished text of the same salt."""
        copied = (*tokens[-match.length :], *match.drafts)
        if not any(_occurs(copied, text) for text in self._finished.get(salt, [])):
            raise InvariantViolation(
                "I11",
                f"{sequence} (salt {salt!r}) was given drafts {match.drafts} after {match.length} equal tokens, and no "
                "finished text of its tenant goes on like that",
            )

    def length(self, sequence: str, pace: Pace, v: int, k: int) -> int:
        """Returns how many drafts a drafter finds that is asked for k: a chain ends where it is unsure."""
        if self._footprint.proposing is not Proposing.CHAIN:
            return k
        joint = self._proposed(sequence, Source.DRAFTER, v, k).joint
        return next((n for n in range(1, k) if joint[n - 1] < pace.going_on), k)

    def drafter_ran(self, asked: int, found: int) -> None:
        self._lengths.append((asked, found))

    def fed(self, count: int) -> None:
        """Counts positions that the drafter was fed."""
        self._fed += count

    def propose(self, row: ScheduledRequest, source: Source, v: int, count: int) -> None:
        """Notes what was proposed for the next step."""
        if count > row.propose:
            self._counts["more_drafts_than_asked_for"] += 1
        if count:
            self.proposals[row.sequence_id] = self._proposed(row.sequence_id, source, v, count)

    def _proposed(self, sequence: str, source: Source, v: int, count: int) -> Proposed:
        record = self.record_of(sequence)
        assert record is not None
        assert record.pace is not None
        sure = [0.02 + 0.98 * chance(self._seed, "sure", sequence, v, place) ** 0.4 for place in range(count)]
        shift = record.pace.shifts.by_source[source]
        return Proposed(source, tuple(sure), self.pacer.calibration.joint(source, sure, shift))

    # ---- times ---------------------------------------------------------------------------------------

    def set_forced(self, engine: str, step: int) -> None:
        """Forces numbers of drafts on the step that is planned next, or takes that back."""
        roll = chance(self._seed, "forced", engine, step)
        verified, proposed = (int(chance(self._seed, what, engine, step) * 7) for what in ("verified", "proposed"))
        self.pacer.forced = (verified, proposed) if roll < FORCED else None

    def work(self, engine: str, plan: StepPlan) -> tuple[StepShape, StepTimes]:
        """Returns what the step did that has just run, and how long that seems to have taken."""
        footprint, lengths = self._footprint, self._lengths
        passes: tuple[int, ...] = ()
        if lengths and footprint.proposing is Proposing.CHAIN:
            longest = max(found for _asked, found in lengths)
            passes = tuple(sum(found > place for _asked, found in lengths) for place in range(longest))
        elif lengths and footprint.groups:
            passes = (sum(footprint.draft_rows(asked) for asked, _found in lengths),)
        rows = sum(row.num_rows + row.tap_rows for row in plan.scheduled)
        prompts = sum(row.num_rows + row.tap_rows - 1 - row.drafts for row in plan.scheduled)
        shape = StepShape(len(plan.scheduled), rows, rows, self._fed, passes, prompts)
        era = plan.step // STEPS_OF_A_PRICE
        row_s, pass_s = (
            PRICES[int(len(PRICES) * chance(self._seed, what, engine, era))] for what in ("row price", "pass price")
        )
        target_s, draft_s = 1.0 + row_s * rows, 0.01 * self._fed + sum(pass_s * (1 + row_s * n) for n in passes)
        return shape, StepTimes(target_s, draft_s, target_s + draft_s + 0.1)


def _occurs(part: tuple[int, ...], text: tuple[int, ...]) -> bool:
    return any(text[start : start + len(part)] == part for start in range(len(text) - len(part) + 1))
