"""Memory for KV: divided by what texts need, never less than one of them, and held only as long as it serves."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from tests.engine.tiny import tiny_engine, tiny_model, tiny_spec

from outrider.api.llm import LLM
from outrider.engine.build import CACHED_TEXTS
from outrider.engine.memory import arena_pages, kept_tokens, longest_text, sized, tokens_held, total_bytes, unsized
from outrider.errors import ConfigError
from outrider.kv import Full, GroupSpec, KVConfig, KVLayout, Sliding
from outrider.kv.archetypes import DrafterShape, block_from_taps
from outrider.kv.retention import Retention
from outrider.kv.sizing import Sizing, decoding_pages, worst_case_pages
from outrider.sampling import SamplingParams

MIB = 1 << 20


def layout_of(*, draft_window: int | None = None) -> KVLayout:
    draft = GroupSpec(
        name="draft", kind=Sliding(draft_window) if draft_window else Full(), page_tokens=16, slot_bytes=512
    )
    return KVLayout(
        target=(
            GroupSpec(name="window", kind=Sliding(512), page_tokens=16, slot_bytes=15 * 256),
            GroupSpec(name="full", kind=Full(), page_tokens=80, slot_bytes=3 * 256),
        ),
        footprint=block_from_taps("drafter", DrafterShape(groups=(draft,), taps=(1,))),
    )


def config_of(layout: KVLayout, **settings: Any) -> KVConfig:
    return unsized(layout, **({"max_model_len": 8192, "step_tokens": 512} | settings))


@pytest.mark.parametrize("retention", ["dense", "tail", "2048"])
@pytest.mark.parametrize("draft_window", [None, 256])
def test_the_budget_is_used_and_the_longest_text_runs(retention: str, draft_window: int | None) -> None:
    layout = layout_of(draft_window=draft_window)
    config = config_of(layout, retention=Retention.of(retention))
    for budget in (24 * MIB, 100 * MIB, 1000 * MIB):
        assert longest_text(layout, config, k=4, budget_bytes=budget) == 8192
        done = sized(layout, config, k=4, budget_bytes=budget, most_tokens=None)
        used = total_bytes(layout, done.arena_pages)
        assert budget - sum(layout.arena_page_bytes) <= used + sum(layout.arena_page_bytes)
        assert used <= budget
        assert Sizing(layout, done).longest(4, draft=True) == 8192


def test_a_budget_that_is_too_small_gives_the_longest_text_that_runs() -> None:
    layout = layout_of()
    config = config_of(layout)
    longest = longest_text(layout, config, k=4, budget_bytes=9 * MIB)
    assert 512 < longest < 8192
    for length, fits in ((longest, True), (longest + 1, False)):
        pages = tuple(count + 1 for count in worst_case_pages(layout, config, length, 4, draft=True))
        assert (total_bytes(layout, pages) <= 9 * MIB) == fits
    with pytest.raises(ConfigError, match="do not hold a single page"):
        longest_text(layout, config, k=4, budget_bytes=1000)


def test_no_more_is_taken_than_the_texts_that_are_to_be_held_could_use() -> None:
    """How many these are is not only a matter of requests: with prefix caching those that ended count too."""
    layout = layout_of()
    config = config_of(layout)
    least = tuple(count + 1 for count in worst_case_pages(layout, config, 8192, 4, draft=True))
    done = sized(layout, config, k=4, budget_bytes=1 << 40, most_tokens=100_000)
    assert done.arena_pages == arena_pages(layout, config, tokens=100_000, least=least)
    assert tokens_held(layout, done) >= 100_000


def test_an_arena_of_windows_is_sized_by_what_the_policy_keeps() -> None:
    layout = layout_of(draft_window=256)
    kept = {
        name: kept_tokens(layout, config_of(layout, retention=Retention.of(name)), 2, 4096)
        for name in ("dense", "tail", "1024")
    }
    # Everything; a window while it runs, and a step's rows; what lies under the target's window at four boundaries.
    assert kept["dense"] == 4096
    assert 256 < kept["tail"] < 1024
    assert kept["tail"] <= kept["1024"] < 4 * 600
    full = layout_of()
    assert kept_tokens(full, config_of(full, retention=Retention.of("tail")), 2, 4096) == 4096


def test_pages_while_decoding_are_what_a_sequence_holds() -> None:
    layout = layout_of()
    config = config_of(layout, retention=Retention.of("tail"))
    window, full, draft = decoding_pages(layout, config, 8192, 4)
    assert (full, draft) == (103, 513)
    # A window, the boundary before the end and its margin, 1 + 4 rows, and a page at the ragged front.
    assert window == -(-(511 + 79 + 2 + 5) // 16) + 1


# ---- the engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("retention", ["dense", "tail", 64])
@pytest.mark.parametrize("windows", [(33, 33), (33, 33, 33, 33, 33, None), (None, 33)])
def test_a_cache_holds_texts_that_ended_however_few_run_at_once(
    windows: tuple[int | None, ...], retention: str | int
) -> None:
    engine = tiny_engine(tiny_model(tiny_spec(windows=windows)), block_size=4, kv_retention=retention, max_num_seqs=1)
    llm, rng = LLM.over(engine), Random(4)
    conversations = [[rng.randrange(256) for _ in range(60)] for _ in range(8)]
    alignment = engine.scheduler.kv.layout.alignment
    for turn in range(3):
        for known in conversations:
            answer = llm.generate(known, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
            if turn:
                # Of the last token that was written there is no KV, and three more are new.
                assert answer.metrics.cached_tokens >= (len(known) - 4) // alignment * alignment
            known += [*answer.outputs[0].token_ids, 7, 8, 9]


def test_memory_that_was_named_is_the_caches() -> None:
    for named in (MIB, 5 * MIB):
        engine = tiny_engine(max_num_seqs=1, kv_cache_memory_bytes=named)
        taken = engine.runner.store.total_bytes
        assert named - engine.scheduler.kv.layout.arena_page_bytes[0] < taken <= named
    without = tiny_engine(max_num_seqs=1, kv_cache_memory_bytes=5 * MIB, enable_prefix_caching=False)
    assert 256 <= tokens_held(without.scheduler.kv.layout, without.scheduler.kv.config) < 512


@pytest.mark.parametrize(("at_once", "texts"), [(1, CACHED_TEXTS), (2 * CACHED_TEXTS, 2 * CACHED_TEXTS)])
def test_of_memory_that_was_not_named_no_more_is_taken_than_serves(at_once: int, texts: int) -> None:
    engine = tiny_engine(max_num_seqs=at_once, max_num_batched_tokens=256, kv_cache_memory_bytes=None)
    held = tokens_held(engine.scheduler.kv.layout, engine.scheduler.kv.config)
    assert texts * 256 <= held < texts * 512


@pytest.mark.parametrize("retention", ["dense", "tail", 64])
def test_texts_are_the_same_with_any_policy(retention: str | int) -> None:
    model = tiny_model(tiny_spec(windows=(16, 16, None)))
    params = SamplingParams(temperature=0, max_tokens=30)
    texts = []
    for settings in ({"enable_prefix_caching": False}, {"kv_retention": retention}):
        engine = tiny_engine(model, block_size=4, speculate=True, **settings)
        written = []
        known = [3, 1, 4, 1, 5] * 8
        for turn in range(4):
            engine.add_request(str(turn), known, params)
            output = engine.output(str(turn))
            while engine.has_work:
                engine.step()
            written.append(list(output.outputs[0].token_ids))
            if turn and settings.get("enable_prefix_caching", True):
                assert output.metrics.cached_tokens >= (len(known) - 7) // 8 * 8 - 8
            known = [*known, *written[-1], turn, 2, 7]
        texts.append(written)
    assert texts[0] == texts[1]
