"""The drafters that come with the default model: they accept as well on a warm cache as on a cold one.

Sums run in one order on a CPU, so a drafter that finds the KV it should find makes the very same drafts. Compared is
therefore every step of every request, which is more than the mean: how many drafts, and how many of them were right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from outrider.backends.cpu.packing import CPUWeightForms
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.models.load import LoadedModel, load_model
from outrider.models.resolve import DEFAULT_MODEL, packaged_drafter
from outrider.sampling import SamplingParams
from outrider.tools.bench.texts import QUESTIONS

TOKENS = 48
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
METHODS: dict[str, dict[str, float]] = {
    "dflash": {"num_speculative_tokens": 7},
    "eagle3": {"num_speculative_tokens": 5},
    "dflash, likely drafts": {"draft_confidence": 0.2},
}
"""How much each method drafts. Where the engine chooses, it goes by how long steps take, and no two runs have the same
steps."""
Step = tuple[int, int]
"""Tokens so far, and how many this step added."""


@cache
def model() -> LoadedModel:
    return load_model(DEFAULT_MODEL, dtype=torch.float32, forms=CPUWeightForms(packed=True))


@cache
def prompts() -> list[list[int]]:
    template, tokenizer = model().chat_template, model().tokenizer
    assert template is not None
    texts = [template.render([{"role": "user", "content": question}]) for question in QUESTIONS[:5]]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def name_of(method: str) -> str:
    return method.partition(",")[0]


def engine_for(method: str, **settings: object) -> Engine:
    how_much: dict[str, Any] = dict(METHODS.get(method, {}))
    speculation = SpeculativeConfig(method=name_of(method), **how_much)
    defaults: dict[str, object] = {"kv_cache_memory_bytes": 1 << 27, "sanitizer": "raise", "sanitizer_level": "bytes"}
    config = EngineConfig(speculative_config=speculation, **(defaults | settings))  # type: ignore[arg-type]
    return build_engine(config, model=model())


def run(
    engine: Engine,
    each_step: Callable[[Engine], None] = lambda engine: None,
) -> list[list[Step]]:
    """Returns the tokens that each step of each prompt yielded, one prompt after the other."""
    steps: list[list[Step]] = []
    for number, prompt in enumerate(prompts()):
        engine.add_request(str(number), prompt, PARAMS)
        output, found, before = engine.output(str(number)), list[Step](), 0
        while engine.has_work:
            each_step(engine)
            engine.step()
            have = len(output.outputs[0].token_ids)
            if have > before:
                found.append((before, have - before))
                before = have
        steps.append(found)
    return steps


def mean_length(steps: list[list[Step]]) -> float:
    counted = [added for each in steps for _before, added in each[1:]]
    return sum(counted) / len(counted)


@cache
def cold(method: str) -> list[list[Step]]:
    return run(engine_for(method, enable_prefix_caching=False))


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_is_found_by_its_target_and_accepts_well(method: str) -> None:
    assert packaged_drafter(DEFAULT_MODEL, name_of(method)) is not None
    assert mean_length(cold(method)) > 2.0


@pytest.mark.parametrize("method", METHODS)
def test_a_full_prefix_hit_changes_no_step(method: str) -> None:
    engine = engine_for(method)
    first = run(engine)
    again = run(engine)
    assert first == cold(method)
    assert again == first
    assert engine.scheduler.kv.hit_tokens > sum(len(prompt) - 17 for prompt in prompts())


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_preemption_and_resumption_change_no_step(method: str, caching: bool) -> None:
    """In mid-text a request loses its KV, all of it or all but what is cached, and comes back."""
    preempted = set()

    def preempt(engine: Engine) -> None:
        for request in list(engine.scheduler.requests.values()):
            name = request.spec.id
            if name not in preempted and len(engine.output(name).outputs[0].token_ids) > 20:
                preempted.add(name)
                engine.scheduler.roster.preempt(request)

    engine = engine_for(method, enable_prefix_caching=caching)
    steps = run(engine, preempt)
    assert engine.scheduler.roster.num_preemptions == len(prompts())
    for each, before in zip(steps, cold(method), strict=True):
        # Where it comes back one token is sampled without a draft; from there the two may step side by side for a
        # while, but from one place they always go the same way.
        places = dict(before)
        met = [(at, added) for at, added in each if at in places]
        differ = [at for at, added in met if places[at] != added]
        assert len(differ) <= 1
        assert len(met) > len(before) // 2
    assert mean_length(steps) == pytest.approx(mean_length(cold(method)), rel=0.1)


@pytest.mark.parametrize("method", ["dflash, chosen", "eagle3, chosen", "ngram, chosen"])
def test_where_the_engine_chooses_only_the_steps_differ(method: str) -> None:
    engine, plain = engine_for(method), engine_for(method)
    assert engine.pacer is not None
    for number, prompt in enumerate(prompts()):
        engine.add_request(str(number), prompt, PARAMS)
        plain.add_request(str(number), prompt, PARAMS, speculate=False)
    texts = []
    for each in (engine, plain):
        outputs = [each.output(str(number)) for number in range(len(prompts()))]
        while each.has_work:
            each.step()
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]
    assert plain.speculation.draft_tokens == 0
    if not method.startswith("ngram"):
        # There are few copies to look up in these texts.
        assert engine.speculation.accepted_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_stretch_without_drafts_leaves_the_drafter_up_to_date(method: str) -> None:
    """Drafts after 200 plain steps are those after 20, made by a drafter that had drafted before."""
    stop, rest = 200, 40
    params = SamplingParams(temperature=0, max_tokens=stop + rest, ignore_eos=True)

    def steps_behind(first: int) -> list[Step]:
        """Plain steps from token `first` to `stop`."""
        engine = engine_for(method)
        engine.add_request("r", prompts()[0], params)
        output, found = engine.output("r"), []
        (request,) = engine.scheduler.requests.values()
        k = request.wanted
        while engine.has_work:
            before = len(output.outputs[0].token_ids)
            request.wanted = 0 if first <= before < stop else k
            engine.step()
            found.append((before, len(output.outputs[0].token_ids) - before))
        return [step for step in found if step[0] >= stop]

    short, long = steps_behind(stop - 20), steps_behind(0)
    assert short == long
    assert short[0][0] == stop
    assert len(short) < rest
