"""Whatever the OpenAPI document allows, and whatever it does not: never a server error."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from tests.server.running import RunningServer

SHORT = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
ENDLESS = ("/kv/stream",)
REFUSED = frozenset(
    {"model", "tool_choice", "response_format", "structured_outputs", "text", "suffix", "best_of", "min_tokens"}
    | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "chat_template_kwargs", "n", "top_logprobs"}
    | {"stop_token_ids", "allowed_token_ids", "logit_bias", "continue_final_message", "max_completion_tokens", "seed"}
    | {"num_speculative_tokens"}
)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.name.lower())
def test_no_request_makes_the_server_fail(tiny: RunningServer, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{tiny.url}/openapi.json")
    seen = set()
    for found in document.get_all_operations():
        operation = found.ok()
        body = "requestBody" in operation.definition.raw
        if operation.path in ENDLESS or (mode is GenerationMode.NEGATIVE and not body):
            # Without parameters nothing can be wrong with a request.
            continue
        seen.add(operation.path)
        _try(operation, mode)
    assert seen >= {*SHORT, "/tokenize", "/detokenize"}
    # Some get through to the engine, or this would test the doorman only.
    figures = tiny.http().get("/metrics").text
    for path in SHORT if mode is GenerationMode.POSITIVE else ():
        assert f'http_requests_total{{handler="{path}",status="200"}}' in figures, path


def _try(operation: Any, mode: GenerationMode) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def never_fails(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            # What is refused for certain, and has tests of its own, would hide everything else.
            case.body = {name: value for name, value in case.body.items() if name not in REFUSED}
            if case.path == "/v1/chat/completions" and len(case.body) % 2:
                # Few conversations that are made up are one that a template can show.
                case.body |= {"messages": [{"role": "user", "content": "x"}], "tools": None}
        if case.path in SHORT and isinstance(case.body, dict):
            # Generating is tested elsewhere; here it would only take long.
            field = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
            if not isinstance(case.body.get(field), str | list | dict):
                case.body[field] = 1
        case.validate_response(case.call(), checks=[not_a_server_error])

    never_fails()
