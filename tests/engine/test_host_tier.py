"""Memory of the host behind the KV cache: what is evicted comes back, and the text and the drafts are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.engine.lossless import tokens_of
from tests.engine.tiny import first_layers, tiny_draft_model, tiny_engine, tiny_model, tiny_spec

from outrider.api.llm import LLM
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.errors import ConfigError
from outrider.models.load import LoadedModel, load_model
from outrider.sampling import SamplingParams
from outrider.transfer.tiers.host import HostTier

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MIB = 1 / 1024
"""One MiB, in GiB."""


def prompts(count: int, length: int, *, seed: int = 0, vocabulary: int = 256) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(1, vocabulary) for _ in range(length)] for _ in range(count)]


def host_of(engine: Engine) -> HostTier:
    assert engine.transfers is not None
    (tier,) = engine.transfers.tiers
    assert isinstance(tier.tier, HostTier)
    return tier.tier


def settle(engine: Engine) -> None:
    """Let copies to the host end."""
    assert engine.transfers is not None
    while not engine.transfers.driver.is_idle:
        engine.transfers.wait(0.1)
        engine.tend()


@contextmanager
def closing(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.close()


def evict_everything(engine: Engine) -> None:
    """Empty the device's part of the cache only."""
    engine.scheduler.kv.reset_cache()


def run(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    return LLM.over(engine).generate([prompt], params)[0]


def test_what_was_evicted_is_loaded_back_and_the_text_is_the_same() -> None:
    with closing(tiny_engine(kv_offloading_size=4 * MIB)) as engine:
        (prompt,) = prompts(1, 70)
        cold = run(engine, prompt)
        settle(engine)
        evict_everything(engine)
        warm = run(engine, prompt)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert (cold.metrics.cached_tokens, warm.metrics.cached_tokens) == (0, 64)
        counters = engine.tier_counters()["host"]
        assert counters.loaded == 4
        assert counters.loaded_bytes == 4 * engine.scheduler.kv.layout.groups[0].page_bytes
        assert counters.refused == counters.missed == 0
        assert counters.stored >= 5
        assert counters.load_s > 0
        assert counters.store_s > 0


def test_a_damaged_page_is_a_miss_and_leaves_the_tier() -> None:
    with closing(tiny_engine(kv_offloading_size=4 * MIB)) as engine:
        (prompt,) = prompts(1, 70)
        cold = run(engine, prompt)
        settle(engine)
        host = host_of(engine)
        key, entry = sorted(host._entries.items())[0]
        entry.value.data[100] ^= 1
        evict_everything(engine)
        warm = run(engine, prompt)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        counters = engine.tier_counters()["host"]
        assert (counters.refused, counters.missed) == (1, 1)
        settle(engine)
        evict_everything(engine)
        assert run(engine, prompt).metrics.cached_tokens == 64, "the page was stored again"
        assert host._entries[key].value is not entry.value


def test_under_pressure_texts_are_the_same_and_the_checker_finds_nothing() -> None:
    """Many conversations take turns on a device that holds few of them, with a host that does not hold all."""
    model = tiny_model()
    drafter = tiny_draft_model(model, first_layers(model, 1))
    page = 2 * 2 * 2 * 8 * 16 * 4
    texts = prompts(12, 90)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 60 * page, "drafter": drafter, "k": 3}
    host_bytes = 80 * page
    with closing(tiny_engine(model, kv_offloading_size=host_bytes / (1 << 30), **sizes)) as engine:
        plain = tiny_engine(model, max_num_seqs=4)
        for turn in range(4):
            order = random.Random(turn).sample(texts, len(texts))
            params = SamplingParams(temperature=0, max_tokens=8 + turn, ignore_eos=True)
            got = LLM.over(engine).generate(order, params)
            assert tokens_of(got) == tokens_of(LLM.over(plain).generate(order, params))
        counters, host = engine.tier_counters()["host"], host_of(engine)
        settle(engine)
        assert counters.loaded > 0
        assert counters.refused == 0
        assert host.used_bytes <= host_bytes
        assert engine.sanitizer is not None
        assert engine.sanitizer.violations == []
        engine.sanitizer.check_conservation()
        engine.reset_prefix_cache()
        assert host.used_bytes == len(host) == 0
        engine.scheduler.kv.check_integrity()


def test_windows_and_draft_groups_come_back_too() -> None:
    model = tiny_model(tiny_spec(windows=(24, None, 24, None)))
    drafter = tiny_draft_model(model, first_layers(model, 2))
    with closing(tiny_engine(model, drafter=drafter, k=3, kv_offloading_size=8 * MIB)) as engine:
        (prompt,) = prompts(1, 120)
        cold = run(engine, prompt)
        settle(engine)
        evict_everything(engine)
        warm = run(engine, prompt)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert warm.metrics.cached_tokens >= 112
        assert warm.metrics.speculation.accepted_at == cold.metrics.speculation.accepted_at
        assert warm.metrics.steps <= cold.metrics.steps


@pytest.fixture(scope="module")
def default_model() -> LoadedModel:
    return load_model(EngineConfig().model, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_acceptance_after_a_hit_from_the_host_is_that_of_a_cold_run_step_for_step(method: str) -> None:
    config = EngineConfig(
        device="cpu",
        max_model_len=1024,
        kv_cache_memory_bytes=512 << 20,
        kv_offloading_size=0.5,
        speculative_config=SpeculativeConfig(method=method, num_speculative_tokens=5),
        sanitizer="raise",
        sanitizer_level="bytes",
        num_threads=1,
    )
    with closing(build_engine(config)) as engine:
        tokenizer = engine.model.tokenizer
        text = "Write a Python function that returns the sum of a list of numbers.\n\ndef total(numbers):\n"
        prompt = tokenizer.encode(text * 6)
        prompt = prompt[: len(prompt) // 16 * 16 + 1]
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        cold, cold_steps = steps_of(engine, prompt, params)
        settle(engine)
        evict_everything(engine)
        warm, warm_steps = steps_of(engine, prompt, params)
        assert warm.metrics.cached_tokens == len(prompt) - 1
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert warm_steps == cold_steps, "each step accepts what it accepted in the cold run"
        assert warm.metrics.speculation.mean_acceptance_length > 1.5


def steps_of(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[RequestOutput, list[int]]:
    """Returns a request's output, and how many tokens each of its steps gave."""
    engine.add_request("a", prompt, params)
    output, steps = engine.output("a"), [0]
    while engine.has_work:
        if engine.waits:
            engine.wait()
        engine.step()
        if len(output.outputs[0].token_ids) > sum(steps):
            steps.append(len(output.outputs[0].token_ids) - sum(steps))
    return output, steps


def test_a_request_that_leaves_while_its_pages_come_takes_nothing_with_it() -> None:
    with closing(tiny_engine(kv_offloading_size=4 * MIB)) as engine:
        first, second = prompts(2, 70)
        cold = run(engine, first)
        settle(engine)
        evict_everything(engine)
        engine.add_request("gone", first, GREEDY)
        engine.step()
        engine.abort("gone")
        other = run(engine, second)
        settle(engine)
        assert engine.scheduler.kv.pool.arenas[0].quarantined == set()
        assert other.finished
        assert run(engine, first).outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offloading_size": -1.0}, "kv_offloading_size"),
        ({"kv_offloading_size": "much"}, "kv_offloading_size"),
        ({"kv_offloading_size": 1e-6}, "hold no page"),
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "leave one of them out"),
        ({"kv_offloading_size": 1.0, "kv_offloading_retention": "some"}, "kv_retention must be dense"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_engine(**settings)
