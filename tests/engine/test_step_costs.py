"""What steps cost is measured before the first request, kept for the next start, and leaves no trace in the engine."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.lossless import tokens_of
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine, tiny_model
from tests.transfer.workers import assert_nothing_left, transfer_config

from outrider.api.llm import LLM
from outrider.engine import step_costs
from outrider.engine.engine import Engine
from outrider.engine.step_costs import Sample, fitted, know_costs
from outrider.runner.runner import StepWork
from outrider.sampling import SamplingParams
from outrider.scheduler.pacing.costs import StepShape
from outrider.scheduler.pacing.curves import KNOTS
from outrider.server.engine_process.facts import counters_of
from outrider.server.engine_process.warm_up import warm_up
from outrider.speculative.lookup import Lookup

PROMPTS = [[5, 6, 7] * 8, [9, 1, 2]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider" / "step-costs"


def choosing(**settings: Any) -> Engine:
    model = tiny_model()
    drafter = tiny_draft_model(model, first_layers(model, 1))
    few: dict[str, Any] = {"max_num_seqs": 4}
    return tiny_engine(model, drafter=drafter, method="draft_model", k=None, **(few | settings))


def looking_up(**settings: Any) -> Engine:
    return tiny_engine(speculate=True, k=None, **({"max_num_seqs": 2} | settings))


def costs_of(engine: Engine) -> dict[str, list[tuple[int, float]]]:
    assert engine.pacer is not None
    return {name: curve.observed for name, curve in engine.pacer.costs.curves.items()}


def assert_as_new(engine: Engine) -> None:
    pacer = engine.pacer
    assert pacer is not None
    new = choosing() if pacer.sizes else looking_up()
    assert not engine.has_work
    assert engine.live_requests == []
    assert engine.scheduler.requests == {}
    assert engine.runner.requests == {}
    assert engine.scheduler.kv.sequences == {}
    assert all(arena.num_free == arena.num_pages - 1 for arena in engine.scheduler.kv.pool.arenas)
    none = {"prompt_tokens": 0, "generated_tokens": 0, "aborted": 0}
    assert counters_of(engine, **none) == counters_of(new, **none)
    assert engine.scheduler.num_stalls == 0
    assert pacer.forced is None
    assert pacer.last_seen is None
    assert pacer.counts == type(pacer.counts)()
    assert pacer.observed_rate == 0.0
    fresh = type(pacer)(engine.scheduler.kv.layout.footprint, sizes=pacer.sizes)
    assert pacer.enter().outlook.values == fresh.enter().outlook.values
    assert vars(pacer.calibration) == vars(fresh.calibration)
    lookup = engine.runner.drafting.lookup
    assert isinstance(lookup, Lookup)
    assert (lookup.lookups, lookup.shared_tokens, lookup.memory_bytes) == (0, 0, 0)


def test_warming_up_leaves_no_counts() -> None:
    engine = looking_up()
    warm_up(engine)
    lookup = engine.runner.drafting.lookup
    assert lookup is not None
    assert (lookup.lookups, lookup.own_hits, lookup.shared_hits) == (0, 0, 0)
    know_costs(engine)
    assert_as_new(engine)


@pytest.mark.parametrize("build", [choosing, looking_up])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        # Requests that reach the model's limit, and more of them than memory holds.
        {"max_model_len": 24},
        {"max_model_len": 64, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 16, "block_size": 4},
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
        {"enable_prefix_caching": False},
        {"kv_transfer_config": transfer_config("kv_both")},
    ],
    ids=["usual", "short", "few pages", "small steps", "no cache", "worker"],
)
def test_measuring_leaves_no_trace(build: Any, settings: dict[str, Any], kept: Path) -> None:
    engine = build(**settings)
    know_costs(engine)
    assert_as_new(engine)
    assert dict(costs_of(engine)["target"])[1] > 0.0
    assert len(list(kept.iterdir())) == 1
    expected = tokens_of(LLM.over(tiny_engine()).generate(PROMPTS, replace(GREEDY, max_tokens=4)))
    if settings.get("max_model_len") != 24:
        assert tokens_of(LLM.over(engine).generate(PROMPTS, replace(GREEDY, max_tokens=4))) == expected
    assert_nothing_left(engine)
    engine.close()


def test_a_measurement_has_all_parts_of_a_step(kept: Path) -> None:
    engine = choosing()
    progress: list[tuple[str, int, int]] = []
    know_costs(engine, lambda what, done, total: progress.append((what, done, total)))
    costs = costs_of(engine)
    assert {1, 2, 4} <= {knot for knot, _seconds in costs["target"]}
    assert all(costs.values())
    assert [(done, total) for _what, done, total in progress] == [(0, 3), (1, 3), (2, 3), (3, 3)]


PER_REQUEST_S, PER_KEY_S = 2e-4, 1e-6


def sample(requests: int, rows: int, passes: tuple[int, ...] = (), *, keys: int = 0, slow: float = 1.0) -> Sample:
    """A step of a machine whose costs are known."""
    target_s = 0.01 + 0.001 * rows + PER_REQUEST_S * requests + PER_KEY_S * keys
    draft_s = 0.0005 * requests + sum(0.002 + 0.0001 * each for each in passes)
    host_s = (0.001 if rows > requests or passes else 0.0005) * requests
    shape = StepShape(requests, rows, keys, requests, passes)
    return Sample(StepWork(shape, slow * target_s, slow * draft_s), host_s)


def test_what_is_kept_explains_what_was_measured() -> None:
    samples = [sample(1, 1), sample(1, 1, keys=1000)]
    for requests in (1, 2, 4):
        for rows in (1, 2, 4):
            passes = (requests,) * rows
            samples += [sample(requests, requests * rows, keys=4 * requests, slow=slow) for slow in (50.0, 1.0, 1.1)]
            samples += [sample(requests, requests * rows, passes, slow=slow) for slow in (50.0, 1.0, 1.1)]
    record = fitted(samples)
    assert record.per_request_s == pytest.approx(PER_REQUEST_S)
    assert record.per_key_s == pytest.approx(PER_KEY_S)
    expected = {
        "target": {rows: 0.01 + 0.001 * rows for rows in (1, 2, 4, 8, 16)},
        "feed": {fed: 0.0005 * fed for fed in (1, 2, 4)},
        "draft": {rows: 0.002 + 0.0001 * rows for rows in (1, 2, 4)},
        "host": {requests: 0.0005 * requests for requests in (1, 2, 4)},
        "drafting_host": {requests: 0.001 * requests for requests in (1, 2, 4)},
    }
    assert set(record.curves) == set(step_costs.CURVES)
    for name, values in expected.items():
        assert dict(record.curves[name]) == pytest.approx(values), name


def test_no_count_is_kept_that_takes_longer_than_a_larger_one() -> None:
    """It was held up at each of its few steps."""
    record = fitted([sample(1, 1), sample(1, 2, slow=9.0), sample(1, 4)])
    costs = dict(record.curves["target"])
    assert costs[1] < costs[2] == costs[4]


def test_what_was_measured_is_read_at_the_next_start(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = choosing()
    know_costs(first)
    (path,) = kept.iterdir()
    before = path.read_bytes()
    monkeypatch.setattr(step_costs, "_measure", pytest.fail)
    second = choosing()
    know_costs(second)
    assert costs_of(second) == costs_of(first)
    assert path.read_bytes() == before
    assert_as_new(second)


def test_other_settings_have_costs_of_their_own(kept: Path) -> None:
    engines = [choosing(), choosing(max_num_seqs=2), choosing(sanitizer="off"), looking_up()]
    for engine in engines:
        know_costs(engine)
    assert len(list(kept.iterdir())) == len(engines)


def test_another_model_has_costs_of_its_own() -> None:
    paths = {
        step_costs._path(tiny_engine(tiny_model(seed=seed), speculate=True, k=None, max_num_seqs=2)) for seed in (0, 1)
    }
    assert len(paths) == 2


def test_an_engine_that_does_not_choose_measures_nothing(kept: Path) -> None:
    know_costs(tiny_engine(speculate=True))
    know_costs(tiny_engine())
    assert not kept.exists()


SOUND: dict[str, Any] = {"curves": {name: [[1, 0.001]] for name in step_costs.CURVES}}
SOUND |= {"per_request_s": 0.0, "per_key_s": 0.0}


def text_of(**changes: Any) -> str:
    return json.dumps(SOUND | changes)


def curves(**changes: Any) -> str:
    return text_of(curves=SOUND["curves"] | changes)


def test_a_file_that_can_be_right_is_believed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of the next test differs from this one in a single thing, so each is refused for that thing."""
    monkeypatch.setattr(step_costs, "_measure", pytest.fail)
    engine = looking_up()
    path = step_costs._path(engine)
    path.parent.mkdir(parents=True)
    path.write_text(text_of())
    know_costs(engine)
    assert costs_of(engine) == {name: [(1, 0.001)] for name in step_costs.CURVES}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"[" * 100_000,
        b"{}",
        text_of(curves=None).encode(),
        text_of(curves=[]).encode(),
        text_of(per_key_s="x").encode(),
        text_of(per_key_s=-1.0).encode(),
        text_of(per_key_s=1.0).encode(),
        text_of(per_request_s=float("nan")).encode(),
        text_of(per_request_s=10**400).encode(),
        curves(target=[]).encode(),
        curves(target=[[1, 0.0]]).encode(),
        curves(target=[[1, 1e3]]).encode(),
        curves(target=[[1, float("inf")]]).encode(),
        curves(target=[[float("inf"), 0.1]]).encode(),
        curves(target=[[17, 0.1]]).encode(),
        curves(target=[[1]]).encode(),
        curves(target=[1]).encode(),
        curves(host=[[1, float("nan")]]).encode(),
        text_of(curves={name: [[1, 0.001]] for name in step_costs.CURVES if name != "drafting_host"}).encode(),
    ],
    ids=lambda content: content[:40].decode(errors="replace"),
)
def test_a_file_that_cannot_be_right_is_measured_again(
    content: bytes, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = looking_up()
    know_costs(engine)
    (path,) = kept.iterdir()
    path.write_bytes(content)
    caplog.clear()
    again = looking_up()
    know_costs(again)
    assert "measured again" in caplog.text
    assert_as_new(again)
    assert all(0 < seconds < 10 for values in costs_of(again).values() for _knot, seconds in values)
    found = json.loads(path.read_text())
    assert {knot for knot, _seconds in found["curves"]["target"]} <= set(KNOTS)
    assert found["curves"]["target"]
    assert [each.name for each in kept.iterdir()] == [path.name]


@pytest.mark.parametrize("where", ["file in place of the directory", "directory in place of the file", "full disk"])
def test_without_a_place_to_write_to_the_next_start_measures_again(
    where: str, kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "file in place of the directory":
        kept.parent.mkdir()
        kept.write_text("not a directory")
    elif where == "directory in place of the file":
        step_costs._path(looking_up()).mkdir(parents=True)
    else:

        def full(*_given: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(step_costs.json, "dump", full)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        caplog.clear()
        engine = looking_up()
        know_costs(engine)
        assert_as_new(engine)
        assert costs_of(engine)["target"]
        assert "the cost of steps is not kept" in caplog.text
    # Nothing half-written stays behind.
    assert not [path for path in kept.parent.rglob("*") if path.is_file() and path != kept]


def test_a_measurement_that_is_interrupted_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    engine, steps = looking_up(), [0]
    step = engine.step

    def interrupted() -> Any:
        steps[0] += 1
        if steps[0] == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        know_costs(engine)
    assert_as_new(engine)
    assert not kept.exists()
