"""How many drafts a request has over HTTP, and what is told of the choice."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.running import RunningServer

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b a b a b a b", "max_tokens": 60},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b a b a b"}], "max_tokens": 60},
    "/v1/responses": {"input": "a b a b a b a b", "max_output_tokens": 60},
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_says_how_many_drafts_it_has(tiny: RunningServer, route: str) -> None:
    http = tiny.http()
    for number in (0, 1, 2):
        body = ROUTES[route] | {"num_speculative_tokens": number, "temperature": 0, "ignore_eos": True}
        answer = http.post(route, json=body)
        assert answer.status_code == 200, answer.text
        counts = answer.json()["metrics"]["speculative_decoding"]
        assert counts["draft_tokens"] <= number * counts["drafts"]
        assert bool(counts["drafts"]) == bool(number)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_speculative_tokens": 2, "speculate": False}, "speculate is false"),
        ({"num_speculative_tokens": 5000}, "at most 4 tokens per step"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 10**30}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "2"}, "num_speculative_tokens"),
    ],
)
def test_what_cannot_be_drafted_is_a_bad_request(
    tiny: RunningServer, fields: dict[str, Any], words: str, stream: bool
) -> None:
    for route, body in ROUTES.items():
        answer = tiny.http().post(route, json=body | fields | {"stream": stream})
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]


def test_a_server_that_chooses_says_what_and_why(choosing: RunningServer) -> None:
    http = choosing.http()
    body = {"prompt": "a b a b a b a b", "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    told = http.get("/speculation").json()
    assert (told["drafter"], told["chooses"]) == ("ngram", True)
    assert told["choice"]["plain_rate"] > 0
    assert told["choice"]["observed_rate"] > 0
    assert [1, pytest.approx(told["costs"]["target"][0][1])] == told["costs"]["target"][0]
    assert told["costs"]["target"][0][1] > 0
    assert told["steps"]["drafting"] + told["steps"]["plain"] > 0
    assert told["lookup"]["lookups"] > 0
    for counts in told["sources"].values():
        assert 0 <= counts["accepted"] <= counts["verified"] <= counts["offered"]
    (card,) = http.get("/v1/models").json()["data"]
    assert card["chooses_drafts"] is True


def test_a_server_with_a_fixed_number_of_drafts_has_no_choice_to_explain(tiny: RunningServer) -> None:
    told = tiny.http().get("/speculation").json()
    assert (told["drafter"], told["num_speculative_tokens"], told["chooses"]) == ("ngram", 4, False)
    assert told["choice"] is told["costs"] is told["steps"] is told["sources"] is told["lookup"] is None
