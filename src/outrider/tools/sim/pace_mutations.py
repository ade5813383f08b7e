"""Mutations of pacing and of look-up, with their patches."""

from __future__ import annotations

from typing import Any

from outrider.tools.sim.mutation import PACE, Mutation, needs


def keep_replaced_scratch(original: Any) -> Any:
    def note_drafts(self: Any, request: Any, row: Any, **others: Any) -> None:
        proposed = request.proposed
        original(self, request, row, **others)
        request.proposed = proposed

    return note_drafts


def find_in_texts_of_all_salts(original: Any) -> Any:
    def find(self: Any, salt: str, *others: Any) -> Any:
        found = (original(self, other, *others) for other in self._tenants)
        return next((match for match in found if match is not None), None)

    return find


def keep_first_costs(original: Any) -> Any:
    def observe(self: Any, shape: Any, times: Any) -> float:
        self.observations = getattr(self, "observations", 0) + 1
        return original(self, shape, times) if self.observations <= 100 else 0.0

    return observe


def observe_at_next_place(original: Any) -> Any:
    def observe(self: Any, source: Any, place: int, probability: float, *, accepted: bool) -> None:
        original(self, source, place + 1, probability, accepted=accepted)

    return observe


PACE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="scratch_of_replaced_drafts_kept",
        invariant="I3",
        story="drafts that were looked up take the place of the drafter's, and what it wrote for its own counts as fed",
        where="outrider.scheduler.scheduler:Scheduler._note_drafts",
        change=keep_replaced_scratch,
        needs=needs("paced", "keeps"),
    ),
    Mutation(
        name="look_up_in_texts_of_all_salts",
        invariant="I11",
        story="the index of finished texts ignores the salt, so that a request copies from another tenant",
        where="outrider.speculative.lookup.shared:SharedTexts.find",
        change=find_in_texts_of_all_salts,
        needs=needs("paced", "salt"),
    ),
    Mutation(
        name="cost_model_that_never_forgets",
        invariant=PACE,
        story="the costs of the first steps count for ever, although the machine has changed",
        where="outrider.scheduler.pacing.costs:StepCosts.observe",
        change=keep_first_costs,
    ),
    Mutation(
        name="calibration_by_the_wrong_place",
        invariant=PACE,
        story="what was accepted at one place among the drafts corrects the place after it",
        where="outrider.scheduler.pacing.worth:Calibration.observe",
        change=observe_at_next_place,
    ),
)
