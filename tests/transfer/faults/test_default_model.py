"""The default model with its shipped drafters, in two processes: one worker's text, and its acceptance step by step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.requirements import require

require("nixl", "nixl_cu12", "nixl_cu13")

from tests.engine.test_default_model import QUESTIONS  # noqa: E402
from tests.transfer.faults.processes import ROOT, WorkerProcess  # noqa: E402
from tests.transfer.faults.worker import default_worker  # noqa: E402
from tests.transfer.workers import ask, assert_nothing_left  # noqa: E402

from outrider.config import DEFAULT_MODEL  # noqa: E402
from outrider.engine.engine import Engine  # noqa: E402
from outrider.sampling import SamplingParams  # noqa: E402

PROMPTS = 40 if os.environ.get("OUTRIDER_ALL_COMBINATIONS") else 4
"""scripts/test-faults tries more."""
PARAMS = SamplingParams(temperature=0, max_tokens=24)


def prompts() -> list[str]:
    """Prompts of the development set where it lies beside the checkout; otherwise those of another test."""
    path = ROOT.parent / "shared" / "data" / "prompts_dev.jsonl"
    if not path.exists():
        return [f"{question} ({number})" for number in range(3) for question in QUESTIONS][:PROMPTS]
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:PROMPTS]]


def conversation(engine: Engine, text: str) -> list[int]:
    """The prompt that asks this: without the template's words many texts would end with their first token."""
    template = engine.model.chat_template
    assert template is not None
    rendered = template.render([{"role": "user", "content": text}])
    return engine.model.tokenizer.encode(rendered, add_special_tokens=False)[:400]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_two_processes_give_one_workers_text_and_acceptance(method: str, tmp_path: Path) -> None:
    nixl = {"kv_connector": "nixl", "answer_limit_s": 60.0, "read_limit_s": 60.0}
    accepted = moved = cached = 0
    with WorkerProcess("kv_producer", tmp_path, windows=DEFAULT_MODEL, drafter=method, transfer=nixl) as prefill:
        decode = default_worker(method, "kv_consumer", transfer=nixl)
        single = default_worker(method, None, transfer={})
        for number, text in enumerate(prompts()):
            ids = conversation(single, text)
            alone = ask(single, f"r{number}", ids, PARAMS)
            handed = prefill.run(f"r{number}", ids, PARAMS, hand_over=True)
            if number % 4 == 3:
                # Its first half is cached on the decode worker, and not moved.
                ask(decode, f"warm {number}", ids[: len(ids) // 2], SamplingParams(temperature=0, max_tokens=1))
            taken = ask(decode, f"r{number}", ids, PARAMS, ticket=handed["ticket"])
            (one,), (other,) = taken.outputs, alone.outputs
            assert (one.token_ids, one.origins) == (other.token_ids, other.origins), text
            assert taken.metrics.speculation == alone.metrics.speculation
            assert taken.metrics.cached_tokens + taken.metrics.transferred_tokens == len(ids)
            assert taken.metrics.transfer is not None
            assert taken.metrics.transfer.bytes > 0
            accepted += taken.metrics.speculation.accepted_tokens
            moved += taken.metrics.transferred_tokens
            cached += taken.metrics.cached_tokens
        assert min(accepted, moved, cached) > 0
        assert_nothing_left(decode)
        decode.close()
        prefill.until_idle(30)
        prefill.ask("check pages")
