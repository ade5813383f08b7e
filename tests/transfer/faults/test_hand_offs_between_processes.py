"""A prefill worker in another process: the decode worker holds what it needs, byte for byte, and gives one worker's
text."""

from __future__ import annotations

import os
import random
from itertools import product
from pathlib import Path

import pytest
from tests.requirements import require

require("nixl", "nixl_cu12", "nixl_cu13")

from tests.transfer.faults.processes import WorkerProcess  # noqa: E402
from tests.transfer.workers import (  # noqa: E402
    DRAFTERS,
    WINDOWS,
    ask,
    assert_nothing_left,
    make_model,
    make_worker,
    run,
    slots_of,
)

from outrider.sampling import SamplingParams  # noqa: E402
from outrider.scheduler import State  # noqa: E402

PAGES = (8, 16, 32)
WORLDS = list(product(WINDOWS, DRAFTERS))
SAMPLE = WORLDS if os.environ.get("OUTRIDER_ALL_COMBINATIONS") else WORLDS[1::7]
"""scripts/test-faults tries all of them."""
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.mark.parametrize("world", SAMPLE, ids="-".join)
def test_what_is_missing_arrives_from_another_process(world: tuple[str, str], tmp_path: Path) -> None:
    windows, drafter = world
    rng = random.Random(f"{windows} {drafter}")
    p_page, d_page = rng.choice(PAGES), rng.choice(PAGES)
    transport = rng.choice(("cma", "tcp"))
    model = make_model(windows)
    single = make_worker(model, drafter, tmp_path, None)
    transfer = {"kv_connector": "nixl", "kv_transport": transport}
    with WorkerProcess("kv_producer", tmp_path, windows=windows, drafter=drafter, block_size=p_page) as prefill:
        decode = make_worker(model, drafter, tmp_path, "kv_consumer", block_size=d_page, transfer=transfer)
        whole = 2 * max(p_page, d_page)
        cases = list(product((whole - 1, whole, whole + 1), (True, False), (True, False), (False, True)))
        for number, (length, p_ahead, d_ahead, local_hit) in enumerate(rng.sample(cases, 4)):
            prompt = [rng.randrange(256) for _ in range(length)]
            alone = ask(single, f"r{number}", prompt, PARAMS)
            prefill.ask("reset")
            decode.reset_prefix_cache()
            if local_hit:
                ask(decode, f"warm {number}", prompt[: whole // 2 + 1], SamplingParams(temperature=0, max_tokens=1))
            handed = prefill.run(f"r{number}", prompt, PARAMS, hand_over=True, speculate=p_ahead)
            sent = {group: {int(at): slot for at, slot in found.items()} for group, found in handed["slots"].items()}
            bytes_before = decode.transfer_counters().transferred_bytes
            decode.add_request(f"r{number}", prompt, PARAMS, ticket=handed["ticket"], speculate=d_ahead)
            output = decode.output(f"r{number}")
            (sequence,) = decode.scheduler.requests
            request = decode.scheduler.requests[sequence]
            run(decode, f"r{number}", until=lambda _, r=request: r.state in (State.PREFILLING, State.DECODING))  # type: ignore[misc]
            if not output.finished and request.generated == 1:
                arrived = slots_of(decode, sequence)
                for index, group in enumerate(decode.scheduler.kv.layout.groups):
                    own = arrived.get(group.name, {})
                    if index < decode.scheduler.kv.layout.num_target:
                        needed = group.kind.needed(length)
                        assert set(range(needed.start, needed.end)) <= set(own)
                    assert all(sent[group.name].get(at, slot.hex()) == slot.hex() for at, slot in own.items())
            run(decode, f"r{number}")
            assert output.error is None
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
            if p_ahead and d_ahead:
                assert output.outputs[0].origins == alone.outputs[0].origins
            # What is cached here is not moved; everything else is.
            metrics = output.metrics
            assert metrics.cached_tokens + metrics.transferred_tokens == length
            assert metrics.transfer is not None
            assert metrics.transfer.bytes == decode.transfer_counters().transferred_bytes - bytes_before
            if windows == "full" and local_hit:
                assert metrics.cached_tokens > 0
        assert_nothing_left(decode)
        decode.close()
        prefill.until_idle(5)
        prefill.ask("check pages")
