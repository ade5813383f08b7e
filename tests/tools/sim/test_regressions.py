"""Scenarios that once failed, small enough to read."""

from __future__ import annotations

from outrider.tools.sim.campaign import run_scenario
from outrider.tools.sim.drawing import draw
from outrider.tools.sim.scenario import FaultDraw, GroupDraw, PeerDraw, RequestDraw, Scenario


def test_a_start_at_the_hit_after_a_failed_pull_needs_no_tap_rows_that_cannot_read() -> None:
    """A window of one keeps nothing for tap rows: the drafter starts afresh instead."""
    scenario = Scenario(
        seed=623_368,
        archetype="chain_from_taps",
        target=(
            GroupDraw(page_tokens=3, slot_bytes=1, window=1),
            GroupDraw(page_tokens=1, slot_bytes=1),
        ),
        draft=(GroupDraw(page_tokens=3, slot_bytes=1), GroupDraw(page_tokens=1, slot_bytes=1, window=3)),
        peers=(PeerDraw(name="prefill", role="prefill", target_pages=(16, 3), draft_pages=(16, 16), drafter="none"),),
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


def test_a_drafter_that_is_rebuilt_after_a_failed_load_writes_to_no_page_of_the_index() -> None:
    """Two draft groups with pages of 3 and 4 tokens: the shorter load decides where feeding goes on, which was inside a
    page of the other group that the index holds."""
    shared = (3, 7, 8, 5, 8, 8, 4, 9)
    other = (4, 2, 1, 1, 1, 3, 1, 6, 2, 6, 5, 9, 10, 1, 11, 3, 8, 3, 7, 7, 6, 2, 3, 11, 5, 3)
    scenario = Scenario(
        seed=9_102_763_759_210_962,
        archetype="chain_from_tokens",
        target=(GroupDraw(page_tokens=1, slot_bytes=1), GroupDraw(page_tokens=4, slot_bytes=1)),
        draft=(GroupDraw(page_tokens=3, slot_bytes=1), GroupDraw(page_tokens=4, slot_bytes=1)),
        max_model_len=56,
        vocabulary=60,
        arena_slack=1.0,
        max_num_seqs=1,
        max_num_batched_tokens=2,
        max_chunk_tokens=16,
        step_in_flight=False,
        acceptance=0.0,
        transfer_faults=0.6,
        tier_probability=0.5,
        host_retention="5",
        requests=(
            RequestDraw(id="r0", prompt=shared, max_tokens=1, k=1, at=38),
            RequestDraw(id="r1", prompt=shared, max_tokens=1, k=0),
            RequestDraw(id="r2", prompt=other, max_tokens=6, k=0),
            RequestDraw(id="r5", prompt=(*shared, 8, 5, 2, 5, 11, 10, 1, 8, 11, 4, 6), max_tokens=2, k=1),
        ),
        faults=(FaultDraw(at=9, kind="reset", target="decode"),),
    )
    assert run_scenario(scenario).failure is None
