"""Runs each mutation against scenarios that can exercise it, to see which invariant reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.kv.footprint import Proposing
from outrider.tools.sim.campaign import run_scenario
from outrider.tools.sim.drawing import draw
from outrider.tools.sim.mutation import PACE, Mutation
from outrider.tools.sim.pace_campaign import CHANGING_LOADS, STEPS, run_load
from outrider.tools.sim.scenario import WEIGHTS, Scenario
from outrider.tools.sim.world import Failure

MOST_SCENARIOS = 4000
"""Number of scenarios tried for one mutation before it counts as missed."""


def traits(scenario: Scenario) -> frozenset[str]:
    """Returns what a scenario can exercise, in the words that mutations use."""
    layout = scenario.layout()
    footprint = layout.footprint
    drafting = any(request.k for request in scenario.requests)
    windows = [group.window for group in (*scenario.target, *scenario.draft) if group.window]
    found = {
        "drafts": bool(footprint.groups) and drafting,
        "block": footprint.proposing is Proposing.BLOCK and drafting,
        "taps": bool(footprint.taps) and drafting,
        "reach": footprint.token_reach > 0,
        "keeps": footprint.keeps_accepted and drafting,
        "limit": footprint.max_len is not None,
        "shared_arena": bool(
            {spec.page_bytes for spec in layout.target} & {spec.page_bytes for spec in footprint.groups}
        ),
        "sliding": any(group.window for group in scenario.target),
        "sliding_drafts": any(group.window for group in scenario.draft) and drafting,
        "split": scenario.split,
        "other_weights": any(peer.weights != WEIGHTS for peer in scenario.peers),
        "ends": bool(windows) and scenario.retention != "dense" and scenario.prefix_caching,
        "tier": scenario.tier_probability > 0 or scenario.host_probability > 0,
        "host_tier": bool(windows) and scenario.host_probability > 0,
        "remote_tier": bool(windows) and scenario.tier_probability > 0,
        "loads": scenario.split or scenario.tier_probability > 0 or scenario.host_probability > 0,
        "transfer_faults": scenario.transfer_faults > 0,
        "paced": scenario.paced,
        "in_flight": scenario.step_in_flight,
        "ticket_faults": scenario.ticket_faults > 0,
        "readers_stop": any(
            fault.kind == "stop" and fault.side == "decode" and fault.phase in ("fetching", "waiting")
            for fault in scenario.faults
        ),
        "aborted_reading": any(fault.kind == "abort" and fault.phase == "reading" for fault in scenario.faults),
        "late_requests": any(request.at > 60 for request in scenario.requests),
        "compares_bytes": scenario.compare_bytes,
        "death": any(fault.kind == "death" for fault in scenario.faults),
        "interrupt": any(fault.kind == "interrupt" for fault in scenario.faults),
        "abort": any(fault.kind == "abort" for fault in scenario.faults),
        "fork": any(request.n > 1 for request in scenario.requests) and not scenario.split,
        "salt": len({request.salt for request in scenario.requests}) > 1,
        "adapter": len({request.adapter for request in scenario.requests}) > 1,
        "media": any(request.media for request in scenario.requests),
        # Small pages, long drafts, and none to spare: a request that loses its drafter has pages left over.
        "surplus": scenario.arena_slack < 1
        and all(1 < group.page_tokens < 5 for group in scenario.target)
        and any(request.k > 3 for request in scenario.requests),
        "tight": scenario.arena_slack < 1,
    }
    return frozenset(name for name, holds in found.items() if holds)


@dataclass(frozen=True)
class MutationResult:
    mutation: Mutation
    invariant: str | None
    """The invariant of the first failure, or None if there was none."""
    steps: int
    index: int
    """Index of the scenario that caught the mutation, or -1."""
    tried: int
    message: str

    @property
    def caught(self) -> bool:
        return self.invariant == self.mutation.invariant

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.mutation.name,
            "caught": self.caught,
            "expected_invariant": self.mutation.invariant,
            "invariant": self.invariant,
            "steps": self.steps,
            "lineage": self.mutation.lineage or None,
            "scenario": self.index,
            "scenarios_tried": self.tried,
            "message": self.message,
        }


def try_mutation(mutation: Mutation, seed: int) -> MutationResult:
    """Look for a scenario in which the mutation breaks the invariant it is meant to, and that passes without it.

    Only a violation that the sanitizer reports counts. A crash, a wrong token or another invariant is noted,
    and the search goes on. Mutations of pacing are tried on synthetic machines instead.
    """
    if mutation.invariant == PACE:
        return try_on_machines(mutation, seed)
    tried = 0
    missed = MutationResult(mutation, None, 0, -1, 0, "no scenario noticed it")
    for index in range(10 * MOST_SCENARIOS):
        scenario = draw(seed, index)
        if not mutation.needs <= traits(scenario):
            continue
        if tried == MOST_SCENARIOS:
            break
        tried += 1
        failure = _first_failure(mutation, scenario)
        if failure is None:
            continue
        result = MutationResult(mutation, failure.invariant, failure.step, index, tried, failure.message)
        if not result.caught:
            missed = result if missed.index < 0 else missed
        elif run_scenario(scenario).failure is None:
            return result
    return missed


def _first_failure(mutation: Mutation, scenario: Scenario) -> Failure | None:
    with mutation.applied():
        try:
            failure = run_scenario(scenario).failure
        except Exception as crash:
            return Failure("crash", None, f"crashed instead: {type(crash).__name__}: {crash}", 0)
    return failure


def try_on_machines(mutation: Mutation, seed: int) -> MutationResult:
    """Look for a load of the pacing campaign which the mutation slows down too much."""
    for index, load in enumerate(CHANGING_LOADS):
        with mutation.applied():
            problem = run_load(load, seed).problem
        if problem is not None and run_load(load, seed).problem is None:
            return MutationResult(mutation, PACE, STEPS, index, index + 1, problem)
    return MutationResult(mutation, None, 0, -1, len(CHANGING_LOADS), "no machine noticed it")
