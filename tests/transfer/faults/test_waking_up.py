"""A stopped prefill worker that wakes up changes no byte of pages that have gone to another request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.requirements import require

require("nixl", "nixl_cu12", "nixl_cu13")

from tests.transfer.faults.processes import WorkerProcess  # noqa: E402
from tests.transfer.faults.world import phase_of  # noqa: E402
from tests.transfer.workers import ask, assert_nothing_left, make_model, make_worker, run  # noqa: E402

from outrider.engine.engine import Engine  # noqa: E402
from outrider.sampling import SamplingParams  # noqa: E402
from outrider.transfer.links.reads import PeerReads  # noqa: E402

PROMPT = [(7 * place) % 256 for place in range(200)]
OTHER = [(11 * place + 5) % 256 for place in range(200)]
PARAMS = SamplingParams(temperature=0, max_tokens=8)
READ_S = 0.7


@pytest.fixture
def prefill(tmp_path: Path) -> Iterator[WorkerProcess]:
    transfer = {"kv_transport": "tcp", "lease_s": 60.0}
    with WorkerProcess("kv_producer", tmp_path, windows="full", transfer=transfer) as worker:
        assert worker.endpoint
        yield worker


def decode_worker(directory: Path) -> Engine:
    """One whose memory holds little more than one text, so that its pages are used again at once."""
    transfer = {"kv_connector": "nixl", "kv_transport": "tcp", "read_limit_s": READ_S, "answer_limit_s": 0.7}
    return make_worker(
        make_model("full"), "none", directory, "kv_consumer", kv_cache_memory_bytes=230_000, transfer=transfer
    )


def bytes_of(engine: Engine) -> list[torch.Tensor]:
    return [arena.clone() for arena in engine.runner.store._arenas]


def changed_bytes(engine: Engine, before: list[torch.Tensor]) -> int:
    return sum(int((now != then).sum()) for now, then in zip(engine.runner.store._arenas, before, strict=True))


def stop_while_reading(engine: Engine, prefill: WorkerProcess) -> None:
    """Bring a request to where its reads are under way, and its peer, which has been met, answers none of them."""
    # The connection exists: otherwise nothing could be on its way.
    warm = prefill.run("warm", PROMPT[:40], PARAMS, hand_over=True)
    ask(engine, "warm", PROMPT[:40], PARAMS, ticket=warm["ticket"])
    engine.reset_prefix_cache()
    ticket = prefill.run("late", PROMPT, PARAMS, hand_over=True)["ticket"]
    engine.add_request("late", PROMPT, PARAMS, ticket=ticket)
    end_s = time.monotonic() + 10
    while phase_of(engine, "late") != "d" and time.monotonic() < end_s:
        assert engine.transfers is not None
        engine.transfers.driver.advance()
    prefill.stop()
    while phase_of(engine, "late") != "e" and time.monotonic() < end_s:
        engine.step()
    assert phase_of(engine, "late") == "e"


def test_a_peer_that_wakes_up_changes_no_byte(prefill: WorkerProcess, tmp_path: Path) -> None:
    engine = decode_worker(tmp_path)
    stop_while_reading(engine, prefill)
    # The deadline passes, the peer is cut off, and the request is computed here.
    late = run(engine, "late")
    assert late.error is None
    assert engine.transfer_counters().fences == 1
    assert engine.transfers is not None
    assert engine.transfers.driver.is_idle, "the pages have come back"
    engine.reset_prefix_cache()
    # Another request gets them.
    other = ask(engine, "other", OTHER, PARAMS)
    before = bytes_of(engine)
    prefill.go_on()
    time.sleep(1.0)
    assert changed_bytes(engine, before) == 0
    # The checker compares pages with their checksums whenever they are read: what is cached is as it was written.
    again = ask(engine, "again", OTHER, PARAMS)
    assert again.metrics.cached_tokens > 0
    single = make_worker(make_model("full"), "none", tmp_path, None)
    assert late.outputs[0].token_ids == ask(single, "late", PROMPT, PARAMS).outputs[0].token_ids
    for output in (other, again):
        assert output.outputs[0].token_ids == ask(single, "other", OTHER, PARAMS).outputs[0].token_ids
    assert_nothing_left(engine)
    engine.close()
    prefill.until_idle(70)


def test_without_a_fence_a_peer_that_wakes_up_changes_bytes(
    prefill: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why a fence gives reads up for good: with one that does not, late bytes reach pages of another request. The test
    above fails with it, so it can fail."""
    monkeypatch.setattr(PeerReads, "give_up", lambda _reads: None)
    engine = decode_worker(tmp_path)
    stop_while_reading(engine, prefill)
    run(engine, "late")
    engine.reset_prefix_cache()
    ask(engine, "other", OTHER, PARAMS)
    assert engine.transfer_counters().fences == 1
    before = bytes_of(engine)
    prefill.go_on()
    end_s = time.monotonic() + 10
    while not changed_bytes(engine, before) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert changed_bytes(engine, before) > 0
    engine.close()
