"""The default model with its drafter asked for outputs in many forms: all valid, and the same as without drafts.

`scripts/test-grammar` runs it with some hundred requests; the suite with a few.
"""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any, NamedTuple

import jsonschema_rs

from outrider.api.llm import LLM
from outrider.grammar import Grammar, GrammarKind
from outrider.sampling import SamplingParams

SUBJECTS = ("a cat", "the Danube", "a bicycle", "Ada Lovelace", "an old bridge", "rye bread", "Tuesday", "a storm")
SIMPLE: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 24},
    {"type": "string", "enum": ["small", "medium", "large", "größer"]},
    {"type": "integer", "minimum": -5, "maximum": 2000},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
    {"type": "string", "format": "date"},
    {"const": "fixed"},
)
PATTERNS = (
    r"[A-Z][a-z]{3,12}( [a-z]{2,9}){1,4}\.",
    r"\d{4}-\d{2}-\d{2}",
    r"(yes|no|perhaps)(, (and|but) [a-z ]{5,20})?",
)


class Asked(NamedTuple):
    question: list[dict[str, str]]
    params: SamplingParams
    schema: dict[str, Any] | None


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.random()
    if depth and (kind < 0.6 or depth > 2):
        return dict(rng.choice(SIMPLE))
    if depth and kind < 0.75:
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": 1, "maxItems": 3}
    if depth and kind < 0.85:
        return {"anyOf": [random_schema(rng, depth + 1), random_schema(rng, depth + 1)]}
    names = rng.sample(["name", "size", "colour", "count", "parts", "owner", "since", "notes"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def asked(count: int, seed: int) -> list[Asked]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        schema = None if number % 5 == 4 else random_schema(rng)
        grammar = (
            Grammar(kind=GrammarKind.REGEX, text=rng.choice(PATTERNS))
            if schema is None
            else Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
        )
        question = [{"role": "user", "content": f"Describe {rng.choice(SUBJECTS)} as data."}]
        temperature = 0.0 if number % 2 else 0.8
        # Long enough for every form above to end.
        params = SamplingParams(grammar=grammar, temperature=temperature, seed=number, max_tokens=1000)
        found.append(Asked(question, params, schema))
    return found


def problems(count: int, *, seed: int = 0, method: str = "dflash") -> tuple[list[str], float]:
    """What is wrong with the outputs, and how many tokens a step with drafts gave."""
    requests = asked(count, seed)
    questions, params = [each.question for each in requests], [each.params for each in requests]
    memory = {"kv_cache_memory_bytes": 256 << 20}
    drafting = LLM(speculative_config={"method": method}, **memory)
    with_drafts = drafting.chat(questions, params)
    plain = LLM(**memory).chat(questions, params)
    found = []
    for number, (request, output, expected) in enumerate(zip(requests, with_drafts, plain, strict=True)):
        if output.error is not None or expected.error is not None:
            found.append(f"request {number}: {output.error or expected.error}")
            continue
        said = output.outputs[0]
        if said.text != expected.outputs[0].text:
            found.append(f"request {number}: {said.text!r} with drafts, {expected.outputs[0].text!r} without")
        if said.finish_reason != "stop":
            found.append(f"request {number}: ended by {said.finish_reason} after {len(said.token_ids)} tokens")
        elif not _valid(request, said.text):
            found.append(f"request {number}: {said.text!r} is not of its form {request.params.grammar}")
    return found, drafting.engine.speculation.mean_acceptance_length


def _valid(request: Asked, text: str) -> bool:
    if request.schema is not None:
        return jsonschema_rs.is_valid(request.schema, json.loads(text), validate_formats=True)
    assert request.params.grammar is not None
    return re.fullmatch(request.params.grammar.text, text) is not None


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    found, length = problems(count)
    print(*found, sep="\n")
    print(f"{count} requests, {len(found)} problems, {length:.2f} tokens a step with drafts")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
