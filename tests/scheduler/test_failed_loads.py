"""What becomes of a request when a tier or a peer lets it down."""

from __future__ import annotations

import pytest

from outrider.kv import Full, GroupSpec, Interval, KVConfig, KVLayout, KVManager
from outrider.scheduler import LoadFailure, RequestSpec, Role, Scheduler, SchedulerConfig, State, Verdict
from outrider.speculative.footprints import DrafterShape, footprint_for


class Boaster:
    """A tier that claims to hold everything."""

    def contains(self, group: int, key: bytes) -> bool:
        return True


def scheduler(method: str = "none", *, tier: bool = False, failure: LoadFailure = LoadFailure.RECOMPUTE) -> Scheduler:
    draft = GroupSpec(name="draft", kind=Full(), page_tokens=4)
    shape = DrafterShape(groups=(draft,), taps=(1,)) if method != "none" else DrafterShape()
    layout = KVLayout(
        target=(GroupSpec(name="target", kind=Full(), page_tokens=4),), footprint=footprint_for(method, shape)
    )
    kv = KVManager(layout, KVConfig(arena_pages=(64,), step_tokens=16), tiers=(Boaster(),) if tier else ())
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_chunk_tokens=16,
        role=Role.BOTH if tier else Role.DECODE,
        load_failure=failure,
    )
    return Scheduler(config, kv)


def test_a_tier_that_boasts_and_fails_delays_a_request_once() -> None:
    engine = scheduler(tier=True)
    engine.add(RequestSpec(id="r", prompt=tuple(range(9)), max_tokens=3))
    for _ in range(12):
        plan = engine.schedule()
        for request, loads in engine.take_loads():
            for load in loads:
                engine.load_failed(request, load)
        tokens = tuple((1,) if row.samples else () for row in plan.rows)
        engine.commit(plan, Verdict(step=plan.step, tokens=tokens, proposed=(0,) * len(plan.rows)))
    assert not engine.requests


@pytest.mark.parametrize("failure", list(LoadFailure))
def test_a_lost_draft_load_never_costs_the_target_anything(failure: LoadFailure) -> None:
    engine = scheduler("dflash", failure=failure)
    offered = {0: Interval(0, 20), 1: Interval(0, 20)}
    engine.add(RequestSpec(id="r", prompt=tuple(range(1, 22)), max_tokens=9, k=2, prefilled_tokens=1, remote=offered))
    plan = engine.schedule()
    ((request, loads),) = engine.take_loads()
    for load in loads:
        if load.group == 0:
            engine.load_arrived(request, load)
    aside = engine.load_lost(request)
    assert [group for group, _pages in aside] == [1]
    assert engine.requests["r"].state is State.PREFILLING
    assert engine.requests["r"].kv.committed == 20
    assert not engine.requests["r"].kv.drafting
    engine.commit(plan, Verdict(step=plan.step, tokens=(), proposed=()))
    engine.kv.restore_quarantined(aside)
    engine.kv.check_integrity()


def test_a_failed_request_leaves_its_forks_names_free() -> None:
    engine = scheduler(tier=True, failure=LoadFailure.FAIL)
    spec = RequestSpec(id="r", prompt=tuple(range(9)), max_tokens=3, n=2)
    engine.add(spec)
    engine.schedule()
    for request, loads in engine.take_loads():
        for load in loads:
            engine.load_failed(request, load)
    assert [update.finish for update in engine.take_updates()] == ["failed"]
    engine.add(spec)
