"""The engine as a caller sees it: continuations, stops, log-probabilities, aborts, shortage, bad input."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_draft_model, tiny_engine, tiny_model, tiny_spec

from outrider.api.llm import LLM
from outrider.engine.continuation import Continuation
from outrider.engine.engine import Engine
from outrider.engine.outputs import Origin
from outrider.errors import ConfigError, RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.runner.sampler import RequestSampling
from outrider.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def drain(engine: Engine) -> None:
    """Everything has ended and every page has come back."""
    assert not engine.has_work
    assert not engine.scheduler.has_work
    assert not engine.runner.requests
    engine.scheduler.kv.reset_cache()
    assert engine.sanitizer is not None
    engine.sanitizer.check_conservation()
    for arena in engine.scheduler.kv.pool.arenas:
        assert arena.num_free == arena.num_pages - 1


def decode(tokens: list[int]) -> str:
    return tiny_model().tokenizer.decode(tokens)


# ---- continuations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", [False, True])
def test_several_continuations_share_a_prompt_and_differ(speculate: bool) -> None:
    engine = tiny_engine(speculate=speculate)
    params = SamplingParams(temperature=1.0, seed=11, n=4, max_tokens=20)
    output = LLM.over(engine).generate([[5, 6, 7] * 9], params)[0]
    texts = [continuation.token_ids for continuation in output.outputs]
    assert [continuation.index for continuation in output.outputs] == [0, 1, 2, 3]
    assert all(len(text) == 20 for text in texts)
    assert len({tuple(text) for text in texts}) == 4
    alone = LLM.over(tiny_engine()).generate([[5, 6, 7] * 9], replace(params, n=1))[0]
    assert texts[0] == alone.outputs[0].token_ids
    again = LLM.over(tiny_engine(block_size=8)).generate([[5, 6, 7] * 9], params)[0]
    assert texts == [continuation.token_ids for continuation in again.outputs]
    drain(engine)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_greedy_continuations_are_equal(backend: str) -> None:
    llm = LLM.over(tiny_engine(backend=backend, num_threads=1))
    output = llm.generate([[1, 2, 3]], replace(GREEDY, n=3))[0]
    (alone,) = llm.generate([[1, 2, 3]], GREEDY)[0].outputs
    assert [continuation.token_ids for continuation in output.outputs] == [alone.token_ids] * 3


def test_more_continuations_than_seats_all_end() -> None:
    engine = tiny_engine(max_num_seqs=2, max_num_batched_tokens=32)
    running = []
    output = LLM.over(engine).generate(
        [[9] * 30],
        SamplingParams(seed=1, n=7, max_tokens=15),
        on_step=lambda _changed: running.append(engine.scheduler.num_running),
    )[0]
    assert [len(continuation.token_ids) for continuation in output.outputs] == [15] * 7
    assert max(running) == 2
    drain(engine)


def test_a_continuation_without_a_permitted_token_fails_its_request() -> None:
    """The expression allows ax and by, but y is not among the allowed tokens: a text cannot go on after b."""
    model = replace(tiny_model(), eos_ids=(0,))
    ids = {letter: model.tokenizer.encode(letter)[0] for letter in "abx"}
    grammar = Grammar(kind=GrammarKind.REGEX, text="(ax|by)")
    engine = tiny_engine(model)
    params = SamplingParams(
        n=2, temperature=5, max_tokens=8, logprobs=0, grammar=grammar, allowed_token_ids=[0, *ids.values()]
    )
    begun = set()
    for seed in range(12):
        output = LLM.over(engine).generate([[5, 6, 7]], replace(params, seed=seed))[0]
        firsts = tuple(continuation.token_ids[0] for continuation in output.outputs)
        begun.add(firsts)
        if ids["b"] in firsts:
            assert output.error is not None
            assert output.error_is_callers
            assert "allow more tokens" in output.error
            assert [each.finish_reason for each in output.outputs] == ["error", "error"]
        else:
            assert output.error is None
            assert [each.text for each in output.outputs] == ["ax", "ax"]
        for continuation in output.outputs:
            assert continuation.logprobs is not None
            assert len(continuation.logprobs) == len(continuation.token_ids)
    # The fork alone, the first continuation alone, and neither of them.
    a, b = ids["a"], ids["b"]
    assert {(a, b), (b, a), (a, a)} <= begun
    drain(engine)


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("stop", ["string", "token", "none"])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_text_that_ends_with_a_draft_does_not_fail_for_what_would_follow(
    speculate: bool, stop: str, logprobs: int | None
) -> None:
    """After aax only end-of-text may follow, which is not among the allowed tokens. The grammar dictates all of it, so
    that with speculation x is accepted in the step in which the row after it fails."""
    model = replace(tiny_model(), eos_ids=(0,))
    ids = model.tokenizer.encode("ax")
    params = SamplingParams(
        temperature=0,
        max_tokens=8,
        logprobs=logprobs,
        grammar=Grammar(kind=GrammarKind.REGEX, text="aax"),
        allowed_token_ids=ids,
        stop="x" if stop == "string" else None,
        stop_token_ids=[ids[1]] if stop == "token" else None,
    )
    engine = tiny_engine(model, speculate=speculate)
    output = LLM.over(engine).generate([[5, 6, 7]], params)[0]
    found = output.outputs[0]
    assert found.token_ids == [ids[0], *ids]
    assert len(found.pieces) == 3
    if logprobs is not None:
        assert found.logprobs is not None
        assert [each.token for each in found.logprobs] == found.token_ids
    assert engine.speculation.accepted_tokens == (2 if speculate else 0)
    if stop == "none":
        assert output.error is not None
        assert (found.text, found.finish_reason) == ("aax", "error")
    else:
        assert output.error is None
        assert (found.text, found.finish_reason) == ("aa", "stop")
        assert found.stop_reason == ("x" if stop == "string" else ids[1])
    drain(engine)


# ---- stopping -------------------------------------------------------------------------------------------


def greedy_text() -> tuple[list[int], str]:
    tokens = LLM.over(tiny_engine()).generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    return tokens, decode(tokens)


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_where_it_begins(speculate: bool, include: bool) -> None:
    model = tiny_model()
    tokens, text = greedy_text()
    stop = text[6:9]
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model)) if speculate else tiny_engine(model)
    params = replace(GREEDY, stop=stop, include_stop_str_in_output=include)
    found = LLM.over(engine).generate([[1, 2, 3]], params)[0].outputs[0]
    place = text.index(stop)
    assert found.text == text[: place + (len(stop) if include else 0)]
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert found.token_ids == tokens[: len(found.token_ids)]
    assert stop in decode(found.token_ids)
    assert stop not in decode(found.token_ids[:-1])
    drain(engine)


def test_what_may_become_a_stop_string_is_not_shown_early() -> None:
    _tokens, text = greedy_text()
    params = replace(GREEDY, stop=text[10:14])
    for output in LLM.over(tiny_engine()).stream([1, 2, 3], params):
        assert text.startswith(output.outputs[0].text)
        assert len(output.outputs[0].text) <= text.index(text[10:14])


@pytest.mark.parametrize("speculate", [False, True])
def test_a_stop_token_ends_the_text_and_is_not_shown(speculate: bool) -> None:
    model = tiny_model()
    tokens, _text = greedy_text()
    stop = tokens[7]
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model)) if speculate else tiny_engine(model)
    found = LLM.over(engine).generate([[1, 2, 3]], replace(GREEDY, stop_token_ids=[stop]))[0].outputs[0]
    assert found.token_ids == tokens[: tokens.index(stop) + 1]
    assert found.text == decode(found.token_ids[:-1])
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    drain(engine)


def test_a_stop_string_that_min_tokens_ignores_stays_ignored() -> None:
    """However far back the longest of the stop strings makes the search look."""
    params = SamplingParams(stop=["t", "Z" * 40], min_tokens=19, max_tokens=64)
    tokenizer = tiny_model().tokenizer
    continuation = Continuation("a", 0, RequestSampling(params, vocab_size=256, device="cpu"), tokenizer)
    written = "a" * 17 + "t" + "b" * 30
    for letter in written:
        assert not continuation.take(tokenizer.encode(letter), [Origin.PLAIN], None, None)
    assert continuation.output.text == written
    assert continuation.take(tokenizer.encode("t"), [Origin.PLAIN], None, None)
    assert (continuation.output.text, continuation.output.stop_reason) == (written, "t")


def test_a_stop_string_counts_from_the_token_on_that_completes_min_tokens() -> None:
    tokenizer = tiny_model().tokenizer
    params = SamplingParams(stop="t", min_tokens=3, max_tokens=9)
    continuation = Continuation("a", 0, RequestSampling(params, vocab_size=256, device="cpu"), tokenizer)
    assert continuation.take(tokenizer.encode("attt"), [Origin.PLAIN] * 4, None, None)
    assert (continuation.output.text, continuation.output.num_tokens) == ("at", 3)


def test_what_was_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    tokenizer = tiny_model().tokenizer
    params = SamplingParams(stop="bcd", max_tokens=3)
    continuation = Continuation("a", 0, RequestSampling(params, vocab_size=256, device="cpu"), tokenizer)
    assert not continuation.take(tokenizer.encode("ab"), [Origin.PLAIN] * 2, None, None)
    assert continuation.output.text == "a"
    assert not continuation.take(tokenizer.encode("c"), [Origin.PLAIN], None, "length")
    assert (continuation.output.text, continuation.output.finish_reason) == ("abc", "length")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_shown_where_that_is_asked_for(include: bool, text: str) -> None:
    tokenizer = tiny_model().tokenizer
    tokens = tokenizer.encode("ab")
    params = SamplingParams(stop_token_ids=tokens[1:], include_stop_str_in_output=include)
    continuation = Continuation("a", 0, RequestSampling(params, vocab_size=256, device="cpu"), tokenizer)
    continuation.take(tokens, [Origin.PLAIN] * 2, None, "stop")
    output = continuation.output
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", tokens[1])


def test_end_of_text_stops_unless_told_otherwise() -> None:
    tokens, _text = greedy_text()
    model = replace(tiny_model(), eos_ids=(tokens[5],))
    llm = LLM.over(tiny_engine(model))
    found = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0]
    assert (found.token_ids, found.finish_reason, found.stop_reason) == (
        tokens[: tokens.index(tokens[5]) + 1],
        "stop",
        None,
    )
    assert llm.generate([[1, 2, 3]], replace(GREEDY, ignore_eos=True))[0].outputs[0].token_ids == tokens
    longer = llm.generate([[1, 2, 3]], replace(GREEDY, min_tokens=20))[0].outputs[0]
    assert len(longer.token_ids) >= 20
    assert tokens[5] not in longer.token_ids[:20]


# ---- log-probabilities ----------------------------------------------------------------------------------


def dense_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """From an engine that never splits, caches or drafts: every row of one prompt at once."""
    engine = tiny_engine(model, enable_prefix_caching=False, max_num_batched_tokens=256)
    output = LLM.over(engine).generate([tokens], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
    assert output.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs if entry is not None])


@pytest.mark.parametrize("speculate", [False, True])
def test_log_probabilities_are_the_same_with_drafts(speculate: bool) -> None:
    model = tiny_model()
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model)) if speculate else tiny_engine(model)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=20, logprobs=3, prompt_logprobs=2)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    output = LLM.over(engine).generate([prompt], params)[0]
    continuation = output.outputs[0]
    assert continuation.logprobs is not None
    assert output.prompt_logprobs is not None
    assert [entry.token for entry in continuation.logprobs] == continuation.token_ids
    assert all(len(entry.top) == 3 for entry in continuation.logprobs)
    assert output.prompt_logprobs[0] is None
    prompt_part = [entry for entry in output.prompt_logprobs if entry is not None]
    assert [entry.token for entry in prompt_part] == prompt[1:]
    found = torch.tensor([entry.logprob for entry in [*prompt_part, *continuation.logprobs]])
    torch.testing.assert_close(found, dense_logprobs(model, prompt + continuation.token_ids), atol=1e-4, rtol=1e-4)
    assert continuation.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in continuation.logprobs))


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_every_continuation_has_the_log_probabilities_of_its_own_tokens(max_tokens: int) -> None:
    engine = tiny_engine(speculate=True)
    params = SamplingParams(temperature=4, seed=2, n=6, max_tokens=max_tokens, logprobs=0)
    outputs = LLM.over(engine).generate([[5, 6, 7] * 9], params)[0].outputs
    assert len({continuation.token_ids[0] for continuation in outputs}) > 2
    for continuation in outputs:
        assert continuation.logprobs is not None
        assert [entry.token for entry in continuation.logprobs] == continuation.token_ids
        assert continuation.cumulative_logprob == sum(entry.logprob for entry in continuation.logprobs)
    drain(engine)


def test_prompt_log_probabilities_need_every_row_and_come_in_chunks() -> None:
    model = tiny_model()
    engine = tiny_engine(model, max_num_batched_tokens=8, max_num_seqs=4)
    prompt = list(range(50))
    LLM.over(engine).generate([prompt], GREEDY)
    hits = engine.scheduler.kv.hit_tokens
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    output = LLM.over(engine).generate([prompt], params)[0]
    assert engine.scheduler.kv.hit_tokens == hits
    assert output.prompt_logprobs is not None
    found = torch.tensor([entry.logprob for entry in output.prompt_logprobs if entry is not None])
    torch.testing.assert_close(found, dense_logprobs(model, prompt), atol=1e-4, rtol=1e-4)


# ---- what a caller is told ------------------------------------------------------------------------------


def test_tokens_say_where_they_came_from() -> None:
    model = tiny_model()
    engine = tiny_engine(model, drafter=tiny_draft_model(model, model), k=3)
    output = LLM.over(engine).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9))[0]
    a, b = Origin.ACCEPTED, Origin.BONUS
    assert output.outputs[0].origins == [Origin.PLAIN, a, a, a, b, a, a, a, b]
    assert output.metrics.speculation.mean_acceptance_length == 4.0
    assert output.metrics.steps == 3
    assert "".join(output.outputs[0].pieces) == output.outputs[0].text


def test_text_that_nothing_can_end_is_as_any_other() -> None:
    """At every step, with and without stop strings or log-probabilities that slow it down."""
    model = tiny_model()
    seen = []
    for more in ({}, {"stop": ["never in this text"]}, {"logprobs": 0}):
        engine = tiny_engine(model, drafter=tiny_draft_model(model, model), k=3)
        params = SamplingParams(temperature=0, max_tokens=30, **more)
        engine.add_request("a", [1, 2, 3], params)
        steps, output = [], engine.output("a")
        while not output.finished:
            engine.step()
            only = output.outputs[0]
            # What might begin a stop string is held back.
            text = only.text if "stop" not in more or output.finished else "".join(only.pieces)
            steps.append((list(only.token_ids), list(only.pieces), list(only.origins), text))
        assert steps[-1][3] == model.tokenizer.decode(steps[-1][0])
        seen.append(steps)
    assert seen[0] == seen[1] == seen[2]


def test_cached_tokens_are_counted() -> None:
    llm = LLM.over(tiny_engine())
    prompt = list(range(60))
    assert llm.generate([prompt], GREEDY)[0].metrics.cached_tokens == 0
    # A fully cached prompt recomputes one token.
    assert llm.generate([prompt], GREEDY)[0].metrics.cached_tokens == 59
    # A request that ends with its first rows is counted too.
    assert llm.generate([prompt], replace(GREEDY, max_tokens=1))[0].metrics.cached_tokens == 59
    llm.engine.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY)[0].metrics.cached_tokens == 0


def test_a_grammar_is_refused_where_no_masks_are_made() -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="[ab]+")
    with pytest.raises(RequestError, match=r"regex.*not available"):
        LLM.over(tiny_engine()).generate([1, 2], SamplingParams(grammar=grammar))


def test_a_tenants_cache_is_its_own() -> None:
    engine = tiny_engine()
    for name, salt, hit in (("a", "x", 0), ("b", "y", 0), ("c", "x", 59)):
        engine.add_request(name, list(range(60)), GREEDY, salt=salt)
        output = engine.output(name)
        while not output.finished:
            engine.step()
        assert output.metrics.cached_tokens == hit


# ---- aborts and shortage --------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "ngram", "itself"])
def test_many_requests_with_aborts_and_too_few_pages(drafter: str) -> None:
    """200 requests of mixed lengths, a third of them aborted: the rest say what they say alone, nothing leaks."""
    model, rng = tiny_model(), random.Random(4)
    settings: dict[str, Any] = {"speculate": drafter == "ngram"}
    if drafter == "itself":
        settings = {"drafter": tiny_draft_model(model, model, block_size=8)}
    engine = tiny_engine(
        model, **settings, block_size=8, kv_cache_memory_bytes=200_000, max_model_len=160, max_num_seqs=24
    )
    shared = [rng.randrange(256) for _ in range(40)]
    prompts = [
        shared[: rng.randrange(41)] + [rng.randrange(256) for _ in range(rng.randrange(1, 60))] for _ in range(200)
    ]
    params = [
        SamplingParams(temperature=rng.choice([0, 0.7]), seed=i, max_tokens=rng.randrange(1, 40)) for i in range(200)
    ]
    doomed = {i for i in range(200) if rng.random() < 0.3}
    waiting = list(range(200))
    outputs: dict[int, Any] = {}
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.randrange(8))):
            number = waiting.pop(0)
            engine.add_request(str(number), prompts[number], params[number])
            outputs[number] = engine.output(str(number))
        for number in doomed & outputs.keys():
            if not outputs[number].finished and rng.random() < 0.1:
                ended = engine.abort(str(number))
                assert ended is not None
                assert ended.outputs[0].finish_reason == "abort"
        engine.step()
    assert all(output.finished and output.error is None for output in outputs.values())
    reference = LLM.over(tiny_engine(model, enable_prefix_caching=False, sanitizer="off"))
    expected = tokens_of(reference.generate(prompts, params))
    for number, output in outputs.items():
        tokens = output.outputs[0].token_ids
        if output.outputs[0].finish_reason == "abort":
            assert tokens == expected[number][: len(tokens)]
        else:
            assert tokens == expected[number]
    assert engine.scheduler.num_preemptions > 0 or drafter == "itself"
    drain(engine)


def test_leaving_a_stream_early_ends_its_request() -> None:
    engine = tiny_engine()
    for _output in LLM.over(engine).stream([1, 2, 3], GREEDY):
        break
    drain(engine)


# ---- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ("", "empty"),
        ([1] * 300, "limit is 256"),
        ([1, 256], "token id 256"),
        ([1, -1], "token id -1"),
        ([1, "a"], "whole number"),
        ([1, 2.5], "whole number"),
        ([True, False], "whole number"),
        (b"abc", "text or a list"),
        ({"text": "a"}, "prompt_token_ids"),
        (7, "text or a list"),
        ({"prompt_token_ids": "abc"}, "text or a list"),
    ],
)
def test_a_bad_prompt_is_refused_and_its_neighbours_are_served(prompt: Any, words: str) -> None:
    engine = tiny_engine()
    llm = LLM.over(engine)
    good, bad, last = llm.generate([[1, 2, 3], prompt, [4, 5]], GREEDY)
    assert bad.error is not None
    assert words in bad.error
    assert bad.outputs[0].finish_reason == "error"
    assert len(good.outputs[0].token_ids) == len(last.outputs[0].token_ids) == 24
    with pytest.raises(RequestError, match=words):
        llm.generate(prompt if isinstance(prompt, (str, dict)) else {"prompt_token_ids": prompt}, GREEDY)
    drain(engine)


def test_settings_that_name_unknown_tokens_are_refused() -> None:
    llm = LLM.over(tiny_engine())
    for params in (
        SamplingParams(logit_bias={999: 1.0}),
        SamplingParams(allowed_token_ids=[999]),
        SamplingParams(stop_token_ids=[999]),
    ):
        with pytest.raises(RequestError, match="999"):
            llm.generate([1, 2], params)


def test_a_model_that_returns_no_number_fails_its_own_request_only() -> None:
    model = tiny_model()
    model.parameters.embedding[13] = float("nan")
    engine = tiny_engine(model)
    outputs = LLM.over(engine).generate([[1, 2, 3], [1, 13, 3], [4, 5, 6], [13]], GREEDY)
    assert [output.error is None for output in outputs] == [True, False, True, False]
    assert outputs[1].error is not None
    assert "nan" in outputs[1].error
    assert not outputs[1].error_is_callers
    assert not engine.has_work


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculate": True, "k": 256}, "num_speculative_tokens"),
        ({"max_model_len": 100_000}, "max_model_len"),
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 1 << 50}, r"kv_cache_memory_bytes \(1,.* is more than this machine has .* lower it"),
        ({"speculate": True, "method": "crystal_ball"}, "unknown drafting method"),
        ({"device": "abacus"}, "device"),
        # A drafter that looks drafts up has no blocks that could be too long.
        (
            {"speculate": True, "max_num_batched_tokens": 1, "max_num_seqs": 1},
            r"\(1\) must be larger than max_num_seqs",
        ),
        ({"kv_retention": "sparse"}, "kv_retention must be dense, tail, or an interval in tokens"),
        ({"kv_retention": "9" * 5000}, "kv_retention must be"),
        ({"kv_retention": (1 << 32) + 1}, r"kv_retention: an interval of more than .* use tail"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_engine(**settings)


def test_a_draft_model_with_another_tokenizer_is_refused() -> None:
    import tokenizers
    from tokenizers import decoders, models

    from outrider.models.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.ByteLevel()
    other = replace(tiny_model(seed=2), tokenizer=Tokenizer(backend, source="other"))
    with pytest.raises(ConfigError, match="same tokenizer"):
        tiny_draft_model(tiny_model(), other)


def test_a_file_may_promise_any_context_but_tables_are_made_for_what_memory_holds() -> None:
    engine = tiny_engine(tiny_model(tiny_spec(max_position=10**12)), max_model_len=None, kv_cache_memory_bytes=1 << 20)
    assert engine.max_model_len < 10_000
