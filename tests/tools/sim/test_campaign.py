"""The simulation: clean code passes, every kind of fault happens, and equal inputs give equal runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.tools.sim.campaign import (
    PHASE_SITUATIONS,
    SITUATIONS,
    Tally,
    run_campaign,
    run_scenario,
    without_speculation,
)
from outrider.tools.sim.drawing import draw
from outrider.tools.sim.oracle import EMPTY_SLOT
from outrider.tools.sim.scenario import GroupDraw, RequestDraw, Scenario
from outrider.tools.sim.world import World


@pytest.fixture(scope="module")
def tally() -> Tally:
    return run_campaign(seed=2026, scenarios=800)


def test_nothing_is_wrong_in_any_scenario(tally: Tally) -> None:
    assert tally.failures == []
    assert tally.scenarios == 800
    counts = tally.as_json()
    assert not any(counts[name] for name in ("violations", "wrong_outputs", "leaked_pages", "hit_mismatches", "stuck"))


def test_every_situation_is_reached(tally: Tally) -> None:
    known = (*SITUATIONS, *PHASE_SITUATIONS)
    assert [kind for kind in known if not tally.faults[kind]] == []
    assert set(tally.faults) == set(known)


def test_drafts_are_proposed_and_some_are_rejected(tally: Tally) -> None:
    assert 0 < tally.accepted_tokens < tally.draft_tokens


def test_one_process_and_two_find_the_same() -> None:
    one, two = run_campaign(3, 45, processes=1).as_json(), run_campaign(3, 45, processes=2).as_json()
    for counts in (one, two):
        del counts["seconds"], counts["steps_per_second"]
    assert one == two


@pytest.mark.parametrize("index", range(0, 40, 8))
def test_a_scenario_runs_the_same_way_twice(index: int) -> None:
    first, second = World(draw(9, index)).run(), World(draw(9, index)).run()
    assert (first.digest, first.steps, first.hits) == (second.digest, second.steps, second.hits)


def test_other_seeds_draw_other_scenarios() -> None:
    assert draw(1, 0) == draw(1, 0)
    assert draw(1, 0) != draw(2, 0) != draw(1, 1)


def small_scenario(archetype: str = "block_from_taps", acceptance: float = 1.0) -> Scenario:
    prompt = tuple(range(1, 22))
    return Scenario(
        seed=4,
        archetype=archetype,
        target=(GroupDraw(page_tokens=4, slot_bytes=1),),
        draft=(GroupDraw(page_tokens=4, slot_bytes=1),),
        acceptance=acceptance,
        vocabulary=50,
        requests=(
            RequestDraw(id="a", prompt=prompt, max_tokens=12, k=4, stops=False),
            RequestDraw(id="b", prompt=prompt, max_tokens=12, k=4, at=40, stops=False),
        ),
    )


def test_acceptance_rate_is_a_parameter() -> None:
    full, none = run_scenario(small_scenario()), run_scenario(small_scenario(acceptance=0.0))
    assert full.failure is None
    assert none.failure is None
    assert full.accepted == full.drafts > 0
    assert none.accepted == 0 < none.drafts
    assert full.steps < none.steps


def test_a_wrong_slot_is_a_wrong_token() -> None:
    """The model computes from slots: overwrite one and the text changes."""
    world = World(small_scenario("nothing"))
    device = world.workers["decode"].device
    world.watch(lambda plan, verdict: device.memory[0][device.tables.table("a", 0)[1]].__setitem__(2, EMPTY_SLOT))
    failure = world.run().failure
    assert failure is not None
    assert failure.kind == "wrong_output"
    assert failure.invariant == "I7"


def test_a_drafter_with_a_wrong_context_is_noticed() -> None:
    world = World(small_scenario())
    device = world.workers["decode"].device
    world.watch(lambda plan, verdict: device.memory[0][device.tables.table("a", 1)[1]].__setitem__(2, EMPTY_SLOT))
    failure = world.run().failure
    assert failure is not None
    assert "wrong context" in failure.message


@pytest.mark.parametrize("archetype", ["lookup", "chain_from_tokens", "chain_from_taps", "block_from_taps"])
def test_hits_one_by_one_are_those_of_a_run_without_speculation(archetype: str) -> None:
    scenario = replace(small_scenario(archetype, 0.7), one_by_one=True, arena_slack=20.0)
    result = run_scenario(scenario)
    assert result.failure is None
    assert result.hits == World(without_speculation(scenario)).run().hits
    assert result.hits[1] == ("b", 20)


@pytest.mark.parametrize("archetype", ["nothing", "chain_from_tokens", "chain_from_taps", "block_from_taps"])
def test_media_are_shared_by_content_and_never_by_placeholder(archetype: str) -> None:
    """Twenty-one tokens with a picture at [4, 9): the same one is hit whole, another one not past its place."""
    scenario = small_scenario(archetype, 0.7)
    first = replace(scenario.requests[0], media=((4, 9, "cat"),))
    shown = {"same": (4, 9, "cat"), "other": (4, 9, "dog"), "moved": (5, 10, "cat")}
    others = [replace(first, id=name, at=40, media=(item,)) for name, item in shown.items()]
    result = run_scenario(replace(scenario, requests=(first, *others), one_by_one=True))
    assert result.failure is None
    # A page with media is taken whole or not at all, so that the hits of the others end before it.
    assert dict(result.hits) == {"a": 0, "same": 20, "other": 4, "moved": 4}
    assert result.faults["media_hit"] == 1


@pytest.mark.parametrize("archetype", ["nothing", "chain_from_tokens", "chain_from_taps", "block_from_taps"])
def test_an_adapter_shares_only_with_itself(archetype: str) -> None:
    scenario = small_scenario(archetype, 0.7)
    first = replace(scenario.requests[0], adapter="formal")
    others = [replace(first, id="same", at=40), replace(first, id="none", at=40, adapter="")]
    result = run_scenario(replace(scenario, requests=(first, *others), one_by_one=True))
    assert result.failure is None
    assert dict(result.hits) == {"a": 0, "same": 20, "none": 0}
    assert result.faults["adapter_hit"] == 1
