"""Prefill and decode workers over tiny models, in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine, tiny_model, tiny_spec
from tests.speculative.cases import CASES, engine_with

from outrider.config import KVTransferConfig
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.kv.intervals import Interval
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams

CLUSTER_KEY = "a key that only these tests know"
WINDOWS = {"full": (None, None, None), "mixed": (8, None, 8), "sliding": (5, 5, 5)}
DRAFTERS = ("none", "ngram", "draft model", "full", "eagle3", "mtp, qwen")
"""One of each way of treating KV; the last three are names of tests.speculative.cases."""
K = 3


def transfer_config(role: str, **settings: Any) -> KVTransferConfig:
    given: dict[str, Any] = {"kv_connector": "local", "kv_role": role, "cluster_key": CLUSTER_KEY, "held_share": 1.0}
    return KVTransferConfig(**(given | settings))


def make_worker(
    model: LoadedModel, drafter: str, directory: Path, role: str | None, *, block_size: int = 16, **settings: Any
) -> Engine:
    """An engine with the sanitizer on, at level bytes; without a role it is a single worker."""
    transfer = settings.pop("transfer", {})
    more: dict[str, Any] = {"block_size": block_size, "k": K, **settings}
    if role is not None:
        more["kv_transfer_config"] = transfer_config(role, **transfer)
    if drafter == "none":
        return tiny_engine(model, **more)
    if drafter == "ngram":
        return tiny_engine(model, speculate=True, **more)
    if drafter == "draft model":
        small = tiny_draft_model(model, first_layers(model, 1), block_size=block_size)
        return tiny_engine(model, drafter=small, method="draft_model", **more)
    engine, recorder = engine_with(CASES[drafter], model, directory, **more)
    recorder.cut = more["k"] is None
    return engine


def make_model(windows: str) -> LoadedModel:
    return tiny_model(tiny_spec(windows=WINDOWS[windows]))


def run(engine: Engine, name: str, *, until: Callable[[RequestOutput], bool] | None = None) -> RequestOutput:
    """Step an engine until a request has finished, or `until` says so."""
    output = engine.output(name)
    for _ in range(2000):
        if output.finished or (until is not None and until(output)):
            return output
        engine.step()
        if engine.waits:
            engine.wait(0.2)
    raise AssertionError(f"request {name} does not end")


def ask(engine: Engine, name: str, prompt: list[int], params: SamplingParams, **more: Any) -> RequestOutput:
    engine.add_request(name, prompt, params, **more)
    return run(engine, name)


def slots_of(engine: Engine, sequence_id: str) -> dict[str, dict[int, bytes]]:
    """The bytes of every slot that may leave a worker, by name of the group and position."""
    kv, store = engine.scheduler.kv, engine.runner.store
    sequence = kv.sequences[sequence_id]
    return {
        kv.layout.groups[group].name: {
            position: store.slots_digest(group, sequence.groups[group].pages, Interval(position, position + 1))
            for position in range(interval.start, interval.end)
        }
        for group, interval in kv.export_intervals(sequence).items()
    }


def assert_nothing_left(engine: Engine) -> None:
    """Every page is free once all requests have ended and the cache is empty."""
    engine.tend()
    kv = engine.scheduler.kv
    assert engine.transfers is None or engine.transfers.driver.is_idle
    kv.check_integrity()
    engine.reset_prefix_cache()
    assert [arena.num_pages - 1 - arena.num_free for arena in kv.pool.arenas] == [0] * len(kv.pool.arenas)
