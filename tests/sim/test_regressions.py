"""Scenarios that once failed, small enough to read."""

from __future__ import annotations

from outrider.sim.campaign import run_scenario
from outrider.sim.scenario import GroupDraw, RequestDraw, Scenario, draw


def test_a_start_at_the_hit_after_a_failed_pull_needs_no_tap_rows_that_cannot_read() -> None:
    """A window of one keeps nothing for tap rows: the drafter starts afresh instead."""
    scenario = Scenario(
        seed=623_368,
        method="eagle",
        target=(
            GroupDraw(page_tokens=3, slot_bytes=1, window=1),
            GroupDraw(page_tokens=1, slot_bytes=1),
        ),
        draft=(GroupDraw(page_tokens=3, slot_bytes=1), GroupDraw(page_tokens=1, slot_bytes=1, window=3)),
        peer_target_pages=(16, 3),
        peer_draft_pages=(16, 16),
        peer_drafts=False,
        drafter_max_len=2,
        vocabulary=3,
        arena_slack=0.1,
        max_num_seqs=1,
        max_num_batched_tokens=2,
        max_chunk_tokens=64,
        step_in_flight=True,
        acceptance=1.0,
        requests=(
            RequestDraw(id="r0", prompt=(1, 2, 1), max_tokens=2, k=1, priority=1, salt="o"),
            RequestDraw(id="r1", prompt=(1, 1), max_tokens=2, k=0, at=16, salt="o", stops=False),
            RequestDraw(id="r3", prompt=(1,), max_tokens=25, k=2, stops=False),
        ),
    )
    assert run_scenario(scenario).failure is None


def test_draft_pages_in_the_same_arena_cost_no_hit_when_pages_are_ample() -> None:
    for seed, index in ((1018, 222), (1020, 162), (1031, 70)):
        assert run_scenario(draw(seed, index)).failure is None
