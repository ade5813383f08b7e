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
