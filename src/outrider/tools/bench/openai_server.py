"""A server that speaks OpenAI's API and is to be measured: its models, and which fields of a request it takes.

Only fields of OpenAI's API are certain. Others make the measurement better where the server takes them: `ignore_eos`
keeps all answers equally long, `cache_salt` keeps a prompt from being found in the server's prefix cache when it is
sent again, and `stream_options` makes the server say how many tokens it wrote.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from outrider.errors import ConfigError, RequestError
from outrider.tools.bench.http_client import Client
from outrider.tools.bench.streamed_answer import Answer, error_message, read, record

REFUSED = (400, 422)
"""Statuses with which servers refuse fields that they do not know."""
OPTIONAL_FIELDS: tuple[tuple[str, Any], ...] = (
    ("ignore_eos", True),
    ("cache_salt", "bench"),
    ("stream_options", {"include_usage": True}),
)
START_ONE = "start one, for example with outrider serve, or correct --url"
OURS = "outrider"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    url: str
    """Where the server is, without /v1 at the end."""
    model: str
    speculates: bool
    """Whether the server is one of ours with a drafter: it then knows the field `speculate`."""
    is_ours: bool
    fields: tuple[str, ...] = ()
    """Fields of OPTIONAL_FIELDS that the server takes."""


def base_url(url: str) -> str:
    """Returns the address without /v1 at its end, with which or without users copy it."""
    given = url if "://" in url else f"http://{url}"
    try:
        where = urlsplit(given)
        correct = where.scheme == "http" and where.hostname is not None and (where.port is None or where.port > 0)
    except ValueError:
        correct = False
    if not correct:
        raise ConfigError(f"--url takes an address such as http://127.0.0.1:8000, got {url!r}")
    if where.path.rstrip("/") not in ("", "/v1"):
        raise ConfigError(f"--url takes an address without a path, such as http://127.0.0.1:8000, got {url!r}")
    return f"http://{where.netloc}"


def look_at(url: str, *, model: str | None, key: str | None, route: str) -> ServerFacts:
    """Returns what the server says of itself, or raises an error that says what to do."""
    url = base_url(url)
    client = Client(url, key=key)
    try:
        facts = _models(client, url, model)
        return _with_fields(client, facts, route)
    finally:
        client.close()


def _models(client: Client, url: str, model: str | None) -> ServerFacts:
    try:
        status, text = client.get("/v1/models")
    except (OSError, HTTPException) as problem:
        raise ConfigError(f"no server answers at {url} ({problem}); {START_ONE}") from None
    if status in (401, 403):
        raise ConfigError(f"the server at {url} wants a key ({error_message(text)}); give it with --api-key")
    if status in (404, 405) and model is not None:
        return ServerFacts(url=url, model=model, speculates=False, is_ours=False)
    try:
        listed = json.loads(text)["data"] if status == 200 else []
        entries = {str(entry["id"]): entry for entry in listed}
    except (ValueError, LookupError, TypeError):
        entries = {}
    if not entries:
        raise ConfigError(
            f"the server at {url} does not say which models it has (GET /v1/models: status {status}); name one with "
            "--model, or correct --url"
        )
    if model is not None and model not in entries:
        raise ConfigError(f"the server at {url} has no model {model!r}; it has: {', '.join(entries)}")
    name = next(iter(entries)) if model is None else model
    entry = entries[name]
    is_ours = entry.get("owned_by") == OURS
    return ServerFacts(url=url, model=name, is_ours=is_ours, speculates=is_ours and bool(entry.get("drafter")))


def _with_fields(client: Client, facts: ServerFacts, route: str) -> ServerFacts:
    """Tries a short request with the optional fields, first all at once and then, if that is refused, one by one."""
    every = tuple(name for name, _value in OPTIONAL_FIELDS)
    tried = _try(client, facts, route, every)
    if tried.failure is None:
        return _taking(facts, every)
    if tried.failure not in [f"status {status}" for status in REFUSED]:
        raise _refused(facts, route, tried)
    bare = _try(client, facts, route, ())
    if bare.failure is not None:
        raise _refused(facts, route, bare)
    return _taking(facts, tuple(name for name in every if _try(client, facts, route, (name,)).failure is None))


def _taking(facts: ServerFacts, fields: tuple[str, ...]) -> ServerFacts:
    return ServerFacts(
        url=facts.url, model=facts.model, speculates=facts.speculates, is_ours=facts.is_ours, fields=fields
    )


def _refused(facts: ServerFacts, route: str, answer: Answer) -> RequestError:
    return RequestError(
        f"the server at {facts.url} does not serve a short request to {route} for model {facts.model!r}: "
        f"{answer.failure}: {answer.detail}; correct --url, --model or --text"
    )


def _try(client: Client, facts: ServerFacts, route: str, fields: tuple[str, ...]) -> Answer:
    body = request_body(facts.model, route, "Say hello.", tokens=2, fields=fields)
    return read(record(client, route, body))


CHAT_ROUTE = "/v1/chat/completions"
TEXT_ROUTE = "/v1/completions"


def request_body(
    model: str, route: str, prompt: str, *, tokens: int, fields: tuple[str, ...], salt: str = "bench"
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0}
    if route == CHAT_ROUTE:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    body |= {name: value for name, value in OPTIONAL_FIELDS if name in fields}
    if "cache_salt" in fields:
        body["cache_salt"] = salt
    return body
