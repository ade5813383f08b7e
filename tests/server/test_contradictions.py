"""Settings that leave some continuation without a permitted token are the client's mistake."""

from __future__ import annotations

from tests.server.running import RunningServer

END_OF_TEXT = 2


def test_a_continuation_without_a_permitted_token_is_a_bad_request(tiny: RunningServer) -> None:
    """The expression allows ax and by, but y is not among the allowed tokens."""
    http = tiny.http()
    letters = [
        http.post("/tokenize", json={"model": "tiny", "prompt": letter}).json()["tokens"][-1] for letter in "abx"
    ]
    body = {
        "model": "tiny",
        "prompt": "Hello",
        "n": 2,
        "temperature": 2,
        "logprobs": 0,
        "guided_regex": "(ax|by)",
        "allowed_token_ids": [END_OF_TEXT, *letters],
    }
    refused = 0
    for seed in range(12):
        answer = http.post("/v1/completions", json=body | {"seed": seed})
        if answer.status_code == 200:
            assert [choice["text"] for choice in answer.json()["choices"]] == ["ax", "ax"]
            continue
        refused += 1
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "allow more tokens" in error["message"]
    assert 0 < refused < 12
