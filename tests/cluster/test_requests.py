"""What Dynamo's front end sends, as the engine takes it."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.requests import inexact_after_migration, read_order, seed_of
from outrider.errors import RequestError
from outrider.grammar import GrammarKind


def request(**parts: Any) -> dict[str, Any]:
    """A request as the front end writes it: every field is there, most of them null."""
    sampling = dict.fromkeys(
        ("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p"), None
    ) | dict.fromkeys(("top_k", "min_p", "use_beam_search", "length_penalty", "seed", "guided_decoding"), None)
    stops = {"max_tokens": 20, "stop": None, "stop_token_ids": None, "stop_token_ids_hidden": [2], "min_tokens": None}
    whole: dict[str, Any] = {
        "model": "m",
        "token_ids": [1, 2, 3],
        "sampling_options": sampling | parts.pop("sampling", {}),
        "stop_conditions": stops | {"ignore_eos": None} | parts.pop("stops", {}),
        "output_options": {"logprobs": None, "prompt_logprobs": None} | parts.pop("output", {}),
        "routing": {"dp_rank": 0} | parts.pop("routing", {}),
    }
    return whole | parts


def order(**parts: Any) -> Any:
    return read_order(request(**parts), name="id", defaults={"top_p": 0.9})


def test_settings_come_through_and_the_models_own_fill_the_gaps() -> None:
    read = order(
        sampling={"temperature": 0.5, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.2, "seed": 5},
        stops={"min_tokens": 3, "stop_token_ids": [9]},
        output={"logprobs": 2},
        routing={"cache_salt": "tenant"},
    )
    params = read.params
    assert (params.temperature, params.top_k, params.min_p, params.frequency_penalty) == (0.5, 7, 0.1, 0.2)
    assert (params.top_p, params.seed, params.logprobs, params.max_tokens, params.min_tokens) == (0.9, 5, 2, 20, 3)
    assert set(params.stop_token_ids or ()) == {2, 9}
    assert (read.salt, read.prompt, read.ticket) == ("tenant", [1, 2, 3], None)


def test_a_text_that_ignores_its_end_still_stops_at_tokens_that_the_client_named() -> None:
    params = order(stops={"ignore_eos": True, "stop_token_ids": [9]}).params
    assert params.ignore_eos
    assert params.stop_token_ids == (9,)


def test_a_request_without_a_seed_gets_the_same_one_on_every_worker() -> None:
    assert order().params.seed == order().params.seed == seed_of("id") != seed_of("other")


def test_the_ticket_of_a_prefill_worker_is_found() -> None:
    assert order(prefill_result={"disaggregated_params": {"ticket": "t"}}).ticket == "t"
    assert order(prefill_result={"disaggregated_params": {}}).ticket is None


@pytest.mark.parametrize(
    ("guided", "kind", "text"),
    [
        ({"json": {"type": "integer"}}, GrammarKind.JSON_SCHEMA, '{"type":"integer"}'),
        ({"json": {"type": "object"}}, GrammarKind.JSON_OBJECT, ""),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"choice": ["a", "b"]}, GrammarKind.CHOICE, '["a","b"]'),
        ({"grammar": "root ::= 'a'"}, GrammarKind.EBNF, "root ::= 'a'"),
    ],
)
def test_structured_output_comes_through(guided: dict[str, Any], kind: GrammarKind, text: str) -> None:
    grammar = order(sampling={"guided_decoding": guided}).params.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (kind, text)


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ({"sampling": {"n": 2}}, "n must be 1"),
        ({"sampling": {"use_beam_search": True}}, "beam search"),
        ({"sampling": {"best_of": 3}}, "best_of"),
        ({"sampling": {"guided_decoding": {"structural_tag": {}}}}, "structural_tag"),
        ({"sampling": {"guided_decoding": {"regex": "a", "choice": ["b"]}}}, "one of them"),
        ({"sampling": {"temperature": -1.0}}, "temperature"),
        ({"output": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"multi_modal_data": {"image": 1}}, "images"),
        ({"prompt_embeds": "AAAA"}, "embeddings"),
        ({"routing": {"lora_name": "poet"}}, "poet"),
        ({"prefill_result": {"disaggregated_params": {"ticket": 5}}}, "ticket"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(parts: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        order(**parts)


@pytest.mark.parametrize(
    ("parts", "inexact"),
    [
        ({"sampling": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2}}, []),
        ({"sampling": {"presence_penalty": 0.5}}, ["presence_penalty"]),
        ({"sampling": {"frequency_penalty": 0.5}, "stops": {"min_tokens": 5}}, ["frequency_penalty", "min_tokens"]),
        ({"sampling": {"guided_decoding": {"regex": "a"}}}, ["structured output"]),
    ],
)
def test_settings_that_count_the_output_cannot_be_carried_on_elsewhere(parts: Any, inexact: list[str]) -> None:
    assert inexact_after_migration(order(**parts).params) == inexact
