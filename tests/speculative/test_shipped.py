"""The drafters that come with the default model: they accept as well on a warm cache as on a cold one.

Sums run in one order on a CPU, so a drafter that finds the KV it should find makes the very same drafts. Compared is
therefore every step of every request, which is more than the mean: how many drafts, and how many of them were right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from outrider.bench.texts import QUESTIONS
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.models.load import LoadedModel, load_model
from outrider.models.resolve import DEFAULT_MODEL, packaged_drafter
from outrider.sampling import SamplingParams

TOKENS = 48
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
METHODS: dict[str, int | None] = {"dflash": 7, "eagle3": 5, "dflash by itself": None}
"""By itself it verifies only drafts that are likely."""
Step = tuple[int, int]
"""Tokens so far, and how many this step added."""


@cache
def model() -> LoadedModel:
    return load_model(DEFAULT_MODEL, dtype=torch.float32, as_stored=True)


@cache
def prompts() -> list[list[int]]:
    template, tokenizer = model().chat_template, model().tokenizer
    assert template is not None
    texts = [template.render([{"role": "user", "content": question}]) for question in QUESTIONS[:5]]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def engine_for(method: str | None, **settings: object) -> Engine:
    speculation = None
    if method is not None:
        speculation = SpeculativeConfig(method=method.split()[0], num_speculative_tokens=METHODS[method])
    defaults: dict[str, object] = {"kv_cache_memory_bytes": 1 << 27, "sanitizer": "raise", "sanitizer_level": "bytes"}
    config = EngineConfig(speculative_config=speculation, **(defaults | settings))  # type: ignore[arg-type]
    return build_engine(config, model=model())


def run(
    engine: Engine,
    some: list[list[int]],
    *,
    together: bool = False,
    each_step: Callable[[Engine], None] = lambda engine: None,
) -> list[list[Step]]:
    """What each step of each request yielded."""
    steps: list[list[Step]] = [[] for _ in some]
    groups = [list(range(len(some)))] if together else [[number] for number in range(len(some))]
    for group in groups:
        for number in group:
            engine.add_request(str(number), some[number], PARAMS)
        outputs = {number: engine.output(str(number)) for number in group}
        before = dict.fromkeys(group, 0)
        while engine.has_work:
            each_step(engine)
            engine.step()
            for number, output in outputs.items():
                have = len(output.outputs[0].token_ids)
                if have > before[number]:
                    steps[number].append((before[number], have - before[number]))
                    before[number] = have
    return steps


def mean_length(steps: list[list[Step]]) -> float:
    counted = [added for each in steps for _before, added in each[1:]]
    return sum(counted) / len(counted)


@cache
def cold(method: str) -> list[list[Step]]:
    return run(engine_for(method, enable_prefix_caching=False), prompts())


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_is_found_by_its_target_and_accepts_well(method: str) -> None:
    assert packaged_drafter(DEFAULT_MODEL, method.split()[0]) is not None
    assert mean_length(cold(method)) > 2.0


@pytest.mark.parametrize("method", METHODS)
def test_a_full_prefix_hit_changes_no_step(method: str) -> None:
    engine = engine_for(method)
    first = run(engine, prompts())
    again = run(engine, prompts())
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
            if request.id not in preempted and len(engine.output(request.id).outputs[0].token_ids) > 20:
                preempted.add(request.id)
                engine.scheduler.roster.preempt(request)

    engine = engine_for(method, enable_prefix_caching=caching)
    steps = run(engine, prompts(), each_step=preempt)
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
        request = engine.scheduler.requests["r"]
        k = request.k
        while engine.has_work:
            before = len(output.outputs[0].token_ids)
            request.k = 0 if first <= before < stop else k
            engine.step()
            found.append((before, len(output.outputs[0].token_ids) - before))
        return [step for step in found if step[0] >= stop]

    short, long = steps_behind(stop - 20), steps_behind(0)
    assert short == long
    assert short[0][0] == stop
    assert len(short) < rest


@pytest.mark.parametrize("method", METHODS)
def test_a_neighbour_near_the_limit_changes_no_step(method: str) -> None:
    longest = 256
    neighbour = (prompts()[1] * 8)[: longest - 6]
    engine = engine_for(method, max_model_len=longest)
    steps = run(engine, [*prompts()[:3], neighbour], together=True)
    assert [sum(added for _b, added in each) for each in steps] == [TOKENS] * 3 + [6]
    alone = run(engine_for(method, max_model_len=longest), prompts()[:3])
    assert steps[:3] == alone


@pytest.mark.parametrize("method", METHODS)
def test_hits_of_the_target_are_those_without_a_drafter(method: str) -> None:
    shared = prompts()[0][:-4]
    some = [[*shared, *tail] for tail in ([5], [6, 7, 8], list(range(40, 60)), [5])]

    def hits(engine: Engine) -> list[int]:
        found = []
        for number, prompt in enumerate(some):
            engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
            output = engine.output(str(number))
            while engine.has_work:
                engine.step()
            found.append(output.metrics.cached_tokens)
        return found

    plain = hits(engine_for(None))
    assert hits(engine_for(method)) == plain
    assert min(plain[1:]) > 0
