"""Windows with everything at once: too little memory, small chunks, hits, drafts cut short; the text stays."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.engine.lossless import tokens_of
from tests.speculative.windows import ONE_OF_EACH, alone, engine_for, pairs, target

from outrider.api.llm import LLM
from outrider.engine.memory import least_pages, total_bytes
from outrider.sampling import SamplingParams

FAMILIES = ("mistral", "ministral", "gemma3, one in six", "gpt_oss")
LIMIT, CHUNK_TOKENS, K = 128, 16, 4
LIKELY = {"draft model": 0.004, "eagle3": 0.03, "dflash, sliding": 0.004, "mtp": 0.004}
"""Joint probabilities that only some drafts of these random drafters reach. Look-up gives no probabilities."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Short ones, which all find room and then grow to five windows and more; some with a common beginning."""
    rng = random.Random(3)
    shared = [rng.randrange(60) for _ in range(24)]
    apart = [[rng.randrange(60) for _ in range(length)] for length in (1, 9, 20, 30)]
    return apart + [shared + [rng.randrange(60) for _ in range(length)] for length in (3, 9)]


PARAMS = [
    SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=80, ignore_eos=True)
    for number in range(len(prompts()))
]


@cache
def plain(family: str) -> list[list[int]]:
    return alone(target(family), prompts(), PARAMS, limit=LIMIT)


def texts(family: str) -> list[list[int]]:
    return [prompt + said for prompt, said in zip(prompts(), plain(family), strict=True)]


def continued(family: str) -> list[list[int]]:
    """Prompts that continue a text of the workload."""
    text = texts(family)[-1]
    return [text[:-12], text]


@cache
def continued_plainly(family: str) -> list[list[int]]:
    return alone(target(family), continued(family), [GREEDY] * 2, limit=LIMIT)


ALL = [
    (drafter, family, cut)
    for drafter, family in pairs(ONE_OF_EACH, FAMILIES)
    for cut in ((False, True) if drafter in LIKELY else (False,))
]


@pytest.mark.parametrize(("drafter", "family", "cut"), ALL)
def test_the_text_is_the_targets(drafter: str, family: str, cut: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"limit": LIMIT, "max_num_batched_tokens": CHUNK_TOKENS, "max_num_seqs": 6, "k": K}
    if cut:
        settings["draft_confidence"] = LIKELY[drafter]
    kv = engine_for(drafter, target(family), texts(family), tmp_path, **settings).scheduler.kv
    enough_for_one = total_bytes(kv.layout, least_pages(kv.layout, kv.config, LIMIT, K))
    preemptions = hits = 0
    # In the least memory, texts evict each other, and it depends on their order whether anything stays cached; a second
    # engine has a little more.
    for memory in (enough_for_one, enough_for_one * 13 // 10):
        settings["kv_cache_memory_bytes"] = memory
        engine = engine_for(drafter, target(family), texts(family), tmp_path, **settings)
        llm = LLM.over(engine)
        assert tokens_of(llm.generate(prompts(), PARAMS)) == plain(family)
        preemptions += engine.scheduler.num_preemptions
        assert engine.speculation.accepted_tokens > 0
        # A request that continues a text which has ended reads what lay under its windows, if that is still cached.
        found = [tokens_of(llm.generate([text], GREEDY))[0] for text in continued(family)]
        assert found == continued_plainly(family)
        hits += engine.scheduler.kv.hit_tokens
    assert preemptions > 0
    assert hits > 0
