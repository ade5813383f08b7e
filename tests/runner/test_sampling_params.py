"""A request's settings: vLLM's defaults, one form inside, and errors that say what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from outrider.errors import RequestError
from outrider.sampling import MAX_LOGPROBS, SEED_MAX, SEED_MIN, SamplingParams


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop, params.stop_token_ids, params.logprobs, params.prompt_logprobs) == ((), (), None, None)
    assert params.skip_special_tokens
    assert not (params.ignore_eos)
    assert not (params.include_stop_str_in_output)
    assert not (params.greedy)
    assert not params.penalises


def test_what_means_the_same_becomes_the_same() -> None:
    assert SamplingParams(stop="end") == SamplingParams(stop=["end", "end"])
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(stop_token_ids=[4, 4, 2]).stop_tokens == (4, 2)
    assert SamplingParams(allowed_token_ids=[7]).allowed_token_ids == (7,)
    assert isinstance(SamplingParams(temperature=1).temperature, float)


def test_the_callers_mapping_is_not_kept() -> None:
    bias = {1: 2}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "n": 4},
        {"temperature": 1e-9},
        {"temperature": 1e9},
        {"top_p": 1e-12, "min_p": 1, "top_k": 10**9},
        {"seed": SEED_MIN},
        {"seed": SEED_MAX},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-6},
        {"logit_bias": {0: -100, 1: 100}},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
        {"max_tokens": None, "min_tokens": 10**6},
        {"max_tokens": 5, "min_tokens": 5},
        {"stop": (), "stop_token_ids": []},
    ],
)
def test_the_edges_are_allowed(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


def test_hardly_any_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=2e-5).greedy


NAN, INF = math.nan, math.inf
WRONG: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "misspelt": ({"temprature": 1}, ("temprature", "did you mean 'temperature'?")),
    "unknown": ({"colour": 1}, ("colour", "known fields", "top_p")),
    "n 0": ({"n": 0}, ("n must be", "at least 1", "0")),
    "n too large": ({"n": 1025}, ("n may be at most 1024", "several requests")),
    "n True": ({"n": True}, ("n must be a whole number",)),
    "temperature NaN": ({"temperature": NAN}, ("temperature", "nan", "at least 0")),
    "temperature infinite": ({"temperature": INF}, ("temperature", "finite")),
    "temperature beyond float": ({"temperature": 10**400}, ("temperature", "finite")),
    "temperature negative": ({"temperature": -0.1}, ("temperature", "-0.1")),
    "temperature True": ({"temperature": True}, ("temperature must be a number", "True")),
    "temperature a word": ({"temperature": "hot"}, ("temperature must be a number", "hot")),
    "temperature None": ({"temperature": None}, ("temperature must be a number", "None")),
    "top_p 0": ({"top_p": 0.0}, ("top_p", "more than 0", "at most 1")),
    "top_p above 1": ({"top_p": 1.0001}, ("top_p", "at most 1", "1.0001")),
    "top_k -2": ({"top_k": -2}, ("top_k", "0 keeps all")),
    "top_k a fraction": ({"top_k": 2.5}, ("top_k", "whole number")),
    "min_p above 1": ({"min_p": 2}, ("min_p", "at most 1")),
    "min_p NaN": ({"min_p": NAN}, ("min_p", "nan")),
    "repetition 0": ({"repetition_penalty": 0}, ("repetition_penalty", "more than 0", "1 turns it off")),
    "repetition infinite": ({"repetition_penalty": INF}, ("repetition_penalty", "finite")),
    "presence": ({"presence_penalty": 2.1}, ("presence_penalty", "at most 2")),
    "frequency": ({"frequency_penalty": -2.1}, ("frequency_penalty", "at least -2")),
    "bias too strong": ({"logit_bias": {5: 101}}, ("logit_bias of token 5", "101", "allowed_token_ids")),
    "bias NaN": ({"logit_bias": {5: NAN}}, ("logit_bias", "nan")),
    "bias of a word": ({"logit_bias": {"five": 1}}, ("logit_bias", "token id", "five")),
    "bias a list": ({"logit_bias": [1, 2]}, ("logit_bias", "map token ids")),
    "seed too large": ({"seed": 1 << 63}, ("seed", "64 bits")),
    "seed too small": ({"seed": -(1 << 63) - 1}, ("seed", "at least")),
    "seed a fraction": ({"seed": 0.5}, ("seed", "whole number")),
    "stop empty string": ({"stop": ["a", ""]}, ("stop", "empty string", "leave it out")),
    "stop a number": ({"stop": 5}, ("stop", "list of strings", "5")),
    "stop of numbers": ({"stop": [5]}, ("stop", "list of strings")),
    "stop of bytes": ({"stop": b"end"}, ("stop", "list of strings")),
    "stop id negative": ({"stop_token_ids": [-1]}, ("stop_token_ids", "token id", "-1")),
    "stop ids a string": ({"stop_token_ids": "12"}, ("stop_token_ids", "list of token ids")),
    "nothing allowed": ({"allowed_token_ids": []}, ("allowed_token_ids", "empty", "leave it out")),
    "allowed True": ({"allowed_token_ids": [True]}, ("allowed_token_ids", "token id")),
    "min_tokens -1": ({"min_tokens": -1}, ("min_tokens", "at least 0")),
    "min over max": ({"min_tokens": 17}, ("min_tokens (17)", "max_tokens (16)", "raise the other")),
    "max_tokens 0": ({"max_tokens": 0}, ("max_tokens", "at least 1", "None")),
    "logprobs -1": ({"logprobs": -1}, ("logprobs", "-1", "from 0")),
    "logprobs True": ({"logprobs": True}, ("logprobs", "whole number")),
    "logprobs 21": ({"logprobs": 21}, ("logprobs", "at most 20", "21")),
    "prompt_logprobs 21": ({"prompt_logprobs": 21}, ("prompt_logprobs", "at most 20")),
    "ignore_eos 1": ({"ignore_eos": 1}, ("ignore_eos", "true or false", "1")),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_named_with_what_to_do(case: str) -> None:
    fields, words = WRONG[case]
    with pytest.raises(RequestError) as refused:
        SamplingParams(**fields)
    for word in words:
        assert word in str(refused.value), f"{word!r} is not in: {refused.value}"
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [50]}, {"allowed_token_ids": [1, 50]}, {"logit_bias": {50: 1.0}}]
)
def test_ids_outside_the_vocabulary_are_refused_where_the_model_is_known(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    params.check_vocabulary(51)
    with pytest.raises(RequestError, match=r"token id 50 .* ids go from 0 to 49"):
        params.check_vocabulary(50)
