"""What HTTP costs: the same requests offline and through a server, in turns, one at a time.

    tokens/s    of one request, from sending it to its last token
    ratio       median over the rounds of (offline time / HTTP time) in the same round
    TTFT        from sending a request to its first token
    outside     the part of TTFT before the front end has the request and after the engine has the token
    queued      the part of TTFT from the front end's receiving the request to its first step

Both engines have the same settings. While one works the other waits, and its threads sleep. Neither has a cache hit,
because every request has a salt of its own. Resetting the cache instead would give one of them the pages used last and
the other one pages that were never touched, whose memory the system takes milliseconds to provide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, RequestError
from outrider.kv.checked import whole_number
from outrider.sampling import SamplingParams
from outrider.tools.bench.http_client import Client
from outrider.tools.bench.texts import TEXTS, prompts_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeBenchConfig:
    engine: EngineConfig
    prompt_tokens: int = 64
    tokens: int = 128
    rounds: int = 5
    text: str = "ordinary"

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "tokens", "rounds"):
            whole_number(getattr(self, name), name, at_least=1)
        if self.text not in TEXTS:
            raise ConfigError(f"unknown kind of text {self.text!r}; there are: {', '.join(TEXTS)}")


class Timed(NamedTuple):
    seconds: float
    first_s: float
    token_ids: list[int]
    outside_s: float = 0.0
    queued_s: float = 0.0


def measure(
    config: ServeBenchConfig, engine: Engine, client: Client, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    ids = prompts_of(config.text, engine.model, number=config.rounds + 1, tokens=config.prompt_tokens)
    # As text, because tokenizing is part of serving a request, offline too.
    prompts = [engine.model.tokenizer.decode(prompt) for prompt in ids]
    offline: list[Timed] = []
    served: list[Timed] = []
    for number, prompt in enumerate(prompts):
        progress(f"round {number} of {config.rounds}" if number else "warming up")
        # The first round is a warm-up; after that offline and HTTP take turns in going first.
        runs: list[tuple[list[Timed], Timed]] = []
        for results in (offline, served) if number % 2 else (served, offline):
            timed = (
                _offline(engine, prompt, config, number)
                if results is offline
                else _served(client, prompt, config, number)
            )
            runs.append((results, timed))
        for results, timed in runs if number else ():
            results.append(timed)
    return _report(config, offline, served)


def _offline(engine: Engine, prompt: str, config: ServeBenchConfig, number: int) -> Timed:
    params = SamplingParams(temperature=0.0, max_tokens=config.tokens, ignore_eos=True)
    begun, first = time.perf_counter(), 0.0
    engine.add_request("bench", engine.model.tokenizer.encode(prompt), params, salt=_salt(number))
    output = engine.output("bench")
    while not output.finished:
        engine.step()
        if not first and output.outputs[0].token_ids:
            first = time.perf_counter()
    return Timed(time.perf_counter() - begun, first - begun, output.outputs[0].token_ids)


def _served(client: Client, prompt: str, config: ServeBenchConfig, number: int) -> Timed:
    begun = time.perf_counter()
    stream = client.stream(
        "/v1/completions",
        {
            "prompt": prompt,
            "max_tokens": config.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": _salt(number),
        },
    )
    tokens: list[int] = []
    inside_s = queued_s = 0.0
    for event in stream.events():
        if "error" in event:
            raise RequestError(f"the server refused a request of the benchmark: {event['error']['message']}")
        for choice in event["choices"]:
            tokens += choice["token_ids"]
        if "metrics" in event:
            inside_s = event["metrics"]["time_to_first_token_s"]
            queued_s = event["metrics"]["time_in_queue_s"]
    seconds = time.perf_counter() - begun
    assert stream.first_s is not None
    first_s = stream.first_s - begun
    return Timed(seconds, first_s, tokens, outside_s=first_s - inside_s, queued_s=queued_s)


def _salt(number: int) -> str:
    return f"bench-{number}"


def _report(config: ServeBenchConfig, offline: Sequence[Timed], served: Sequence[Timed]) -> dict[str, Any]:
    pairs = list(zip(offline, served, strict=True))
    return {
        "config": asdict(config),
        "offline_tokens_per_s": median(len(run.token_ids) / run.seconds for run in offline),
        "http_tokens_per_s": median(len(run.token_ids) / run.seconds for run in served),
        "ratio": median(one.seconds / other.seconds for one, other in pairs),
        "offline_ttft_ms": 1000 * median(run.first_s for run in offline),
        "http_ttft_ms": 1000 * median(run.first_s for run in served),
        "ttft_overhead_ms": 1000 * median(other.first_s - one.first_s for one, other in pairs),
        "ttft_outside_ms": 1000 * median(run.outside_s for run in served),
        "ttft_queued_ms": 1000 * median(run.queued_s for run in served),
        "texts": len(pairs),
        "texts_that_differ": sum(one.token_ids != other.token_ids for one, other in pairs),
    }
