"""`outrider serve` with the default model, asked for JSON by many schemas: all valid, and the same as without drafts.

`scripts/test-grammar` runs it with some hundred requests; the suite with a few.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import jsonschema_rs
import openai
from tests.server.running import RunningServer

from outrider.models.resolve import DEFAULT_MODEL

SUBJECTS = ("a cat", "the Danube", "a bicycle", "Ada Lovelace", "an old bridge", "rye bread", "Tuesday", "a storm")
NAMES = ("name", "size", "colour", "count", "parts", "owner", "since", "notes")
# All bounded: a small model would write some of them for ever.
SIMPLE: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 24},
    {"type": "string", "minLength": 3, "maxLength": 12},
    {"type": "string", "enum": ["small", "medium", "large", "größer", 'so-"called"']},
    {"enum": [1, 2.5, None, True, ["a"], {"b": 1}]},
    {"type": "integer", "minimum": -5, "maximum": 2000},
    {"type": "integer", "exclusiveMinimum": 0, "maximum": 100, "multipleOf": 5},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["integer", "null"], "minimum": 3, "maximum": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -2.5, "exclusiveMaximum": 1000},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
    {"type": "string", "pattern": r"^\d{2}-[a-f]{1,3}( (x|yy)){0,2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "ipv4"},
    {"const": "fixed"},
    {"$ref": "#/$defs/place"},
)
DEFINITIONS = {
    "place": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/word"}, "code": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["city"],
    },
    "word": {"type": "string", "pattern": "^[A-Za-z]{1,10}$"},
}


class Asked(NamedTuple):
    question: str
    schema: dict[str, Any]
    temperature: float


class Answer(NamedTuple):
    text: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Report:
    problems: list[str]
    finished: Counter[str]
    tokens: int
    tokens_a_step: float


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.random()
    if depth and (kind < 0.6 or depth > 2):
        return dict(rng.choice(SIMPLE))
    if depth and kind < 0.7:
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": 1, "maxItems": 3}
    if depth and kind < 0.75:
        return {"type": "array", "prefixItems": [random_schema(rng, depth + 1), {"type": "boolean"}], "items": False}
    if depth and kind < 0.83:
        return {"anyOf": [random_schema(rng, depth + 1), random_schema(rng, depth + 1)]}
    if depth and kind < 0.88:
        options = [("cat", "lives", 9), ("dog", "tricks", 30)]
        return {"oneOf": [tagged(kind, name, most) for kind, name, most in options]}
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def tagged(kind: str, name: str, most: int) -> dict[str, Any]:
    number = {"type": "integer", "minimum": 0, "maximum": most}
    return {"type": "object", "properties": {"kind": {"const": kind}, name: number}, "required": ["kind", name]}


def asked(count: int, seed: int) -> list[Asked]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        schema = {**random_schema(rng), "$defs": DEFINITIONS}
        # Drawn with a seed, the text is the same with drafts and without too.
        temperature = 0.8 if number % 4 == 3 else 0.0
        found.append(Asked(f"Describe {rng.choice(SUBJECTS)} as data.", schema, temperature))
    return found


async def answers(client: openai.AsyncOpenAI, requests: list[Asked]) -> list[Answer]:
    places = asyncio.Semaphore(8)

    async def ask(number: int, request: Asked) -> Answer:
        async with places:
            answer = await client.chat.completions.create(
                model=DEFAULT_MODEL,
                messages=[{"role": "user", "content": request.question}],
                response_format={"type": "json_schema", "json_schema": {"name": "data", "schema": request.schema}},
                temperature=request.temperature,
                seed=number,
                # Long enough for every schema above.
                max_tokens=2500,
            )
        choice = answer.choices[0]
        assert answer.usage is not None
        return Answer(choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens)

    return await asyncio.gather(*(ask(number, request) for number, request in enumerate(requests)))


def served_answers(requests: list[Asked], *options: str) -> tuple[list[Answer], float]:
    """What a server says, and how many tokens a step with drafts gave."""
    server = RunningServer(DEFAULT_MODEL, "--kv-cache-memory-bytes", "256M", *options)
    try:
        server.wait()

        async def all_of_them() -> list[Answer]:
            async with server.async_openai() as client:
                return await answers(client.with_options(timeout=1800), requests)

        found = asyncio.run(all_of_them())
        drafts = metric(server, "spec_decode_num_drafts")
        return found, 1 + metric(server, "spec_decode_num_accepted_tokens") / max(drafts, 1.0)
    finally:
        server.stop()


def metric(server: RunningServer, name: str) -> float:
    lines = server.http().get("/metrics").text.splitlines()
    starts = (f"outrider:{name}_total", f"outrider:{name}{{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(starts))


def compare(count: int, *, seed: int = 0, method: str = "dflash") -> Report:
    requests = asked(count, seed)
    with_drafts, tokens_a_step = served_answers(requests, "--speculative-config", json.dumps({"method": method}))
    plain, _ = served_answers(requests, "--no-speculation")
    found = []
    for number, (request, said, expected) in enumerate(zip(requests, with_drafts, plain, strict=True)):
        if said != expected:
            found.append(f"request {number}: {said} with drafts, {expected} without")
        if said.finish_reason != "stop":
            found.append(
                f"request {number}: ended by {said.finish_reason} after {said.tokens} tokens: {said.text[:200]}"
            )
        elif not is_valid(request.schema, said.text):
            found.append(f"request {number}: {said.text!r} is not valid by {json.dumps(request.schema)}")
    return Report(
        problems=found,
        finished=Counter(said.finish_reason for said in with_drafts),
        tokens=sum(said.tokens for said in with_drafts),
        tokens_a_step=tokens_a_step,
    )


def is_valid(schema: dict[str, Any], text: str) -> bool:
    try:
        return jsonschema_rs.is_valid(schema, json.loads(text), validate_formats=True)
    except ValueError:
        return False


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    started_s = time.monotonic()
    report = compare(count)
    print(*report.problems, sep="\n")
    print(
        f"{count} requests, {len(report.problems)} problems; ended by {dict(report.finished)}; {report.tokens} tokens, "
        f"{report.tokens_a_step:.2f} a step with drafts; {time.monotonic() - started_s:.0f} s"
    )
    return 1 if report.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
