"""What a server achieves under load: tokens per second, time to the first token and time per token, for each load.

For any server that speaks OpenAI's API. Every round sends the same requests under every load. With the comparison, it
does so twice, with and without speculation, and in turns (on off, off on, …), so that a slow minute of the machine
touches both alike; the ratios are medians over these pairs. What is reported of one load:

    tokens/s    tokens of all complete answers / time from the first request to the last token; median of the rounds.
                With clients that wait for their answers, only until the first of them has no further request: what
                fewer clients get says nothing of the load, and where answers end at different times, it takes longer
    TTFT        from sending a request to its first text, over all requests of all rounds
    TPOT        time between the first and the last text of an answer / (its tokens − 1), over all requests
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from outrider.errors import ConfigError, RequestError
from outrider.kv.checked import whole_number
from outrider.tools.bench.arrivals import Load, send_all
from outrider.tools.bench.comparison import Measure
from outrider.tools.bench.http_client import Client
from outrider.tools.bench.openai_server import CHAT_ROUTE, TEXT_ROUTE, ServerFacts, request_body
from outrider.tools.bench.streamed_answer import Answer, Recorded, read, record
from outrider.tools.bench.texts import PLAIN_TEXTS, TEXTS, prompt_texts

ON, OFF, AS_IT_IS = "speculation", "no speculation", "as it is"
WARM_UP_TOKENS = 16
REQUESTS_PER_CLIENT, BURSTS, POISSON_S = 4, 3, 20.0
QUICK_REQUESTS_PER_CLIENT, QUICK_BURSTS, QUICK_POISSON_S = 2, 2, 8.0
FEWEST_REQUESTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RatesConfig:
    loads: tuple[Load, ...]
    texts: tuple[str, ...] = ("chat",)
    """Kinds of prompts that come with the program; not used where `questions` are given."""
    questions: tuple[str, ...] = ()
    """Questions of the user, asked as chats."""
    prompt_tokens: int = 64
    """About how long plain texts are."""
    tokens: int = 128
    requests: int | None = None
    """Requests in each round of each load; None for a number that suits the load."""
    rounds: int = 3
    seed: int = 0
    compare_speculation: bool = False
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "tokens", "rounds"):
            whole_number(getattr(self, name), name, at_least=1)
        if self.requests is not None:
            whole_number(self.requests, "requests", at_least=1)
        if not self.loads:
            raise ConfigError("no load is given; give --concurrency, --rate or --burst")
        for text in self.texts:
            if text not in TEXTS:
                raise ConfigError(f"unknown kind of text {text!r}; there are: {', '.join(TEXTS)}")

    @property
    def variants(self) -> dict[str, dict[str, Any]]:
        """Returns what each variant adds to a request."""
        return {ON: {"speculate": True}, OFF: {"speculate": False}} if self.compare_speculation else {AS_IT_IS: {}}

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("questions",) if self.questions else self.texts

    def requests_of(self, load: Load) -> int:
        if self.requests is not None:
            return self.requests
        if load.rate_per_s:
            return max(FEWEST_REQUESTS, round(load.rate_per_s * (QUICK_POISSON_S if self.quick else POISSON_S)))
        if load.every_s:
            return load.clients * (QUICK_BURSTS if self.quick else BURSTS)
        return max(FEWEST_REQUESTS, load.clients * (QUICK_REQUESTS_PER_CLIENT if self.quick else REQUESTS_PER_CLIENT))

    def prompts(self, kind: str, number: int) -> list[str]:
        if self.questions:
            return [self.questions[place % len(self.questions)] for place in range(number)]
        return prompt_texts(kind, number=number, tokens=self.prompt_tokens)

    def route(self, kind: str) -> str:
        return TEXT_ROUTE if kind in PLAIN_TEXTS else CHAT_ROUTE


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    load: Load
    kind: str


def measurements(config: RatesConfig) -> int:
    """Returns the number of times that a set of requests is sent, warm-up included."""
    return (1 + config.rounds) * len(config.loads) * len(config.kinds) * len(config.variants)


def measure(
    config: RatesConfig,
    facts: ServerFacts,
    *,
    key: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Sends everything; returns plain data, ready for JSON."""
    if config.compare_speculation and not facts.speculates:
        why = "has no drafter" if facts.is_ours else "does not say that it is one of Outrider"
        raise ConfigError(
            f"the server at {facts.url} {why}, so speculation cannot be switched off for single requests there; leave "
            "--compare-speculation out"
        )
    cases = [Case(load=load, kind=kind) for load in config.loads for kind in config.kinds]
    turns: dict[Case, dict[str, list[Turn]]] = {case: {name: [] for name in config.variants} for case in cases}
    # The first round is a warm-up; after that each variant goes first in every other round.
    for number in range(config.rounds + 1):
        for case in cases:
            for name in [*config.variants][:: 1 if number % 2 else -1]:
                progress(
                    f"{f'round {number} of {config.rounds}' if number else 'warming up'}: {case.load.name}, "
                    f"{case.kind}{'' if name == AS_IT_IS else f', {name}'}"
                )
                turn = _turn(config, facts, case, name, number, key=key)
                if number:
                    turns[case][name].append(turn)
    return {
        "url": facts.url,
        "model": facts.model,
        "tokens": config.tokens,
        "rounds": config.rounds,
        "cases": [_case_report(config, case, turns[case]) for case in cases],
        "notes": _notes(config, facts, [turn for each in turns.values() for some in each.values() for turn in some]),
    }


# ---- one set of requests ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """What became of one set of requests."""

    answers: list[Answer]
    is_closed: bool = False
    """Whether the requests came from clients that wait for their answers."""

    @property
    def complete(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.failure is None]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.complete)

    @property
    def tokens_per_s(self) -> float | None:
        """None if no answer is complete."""
        if not self.complete:
            return None
        until_s = max(each.ended_s for each in self.complete)
        if self.is_closed:
            last_sent_s = max(each.sent_s for each in self.answers)
            until_s = min((each.ended_s for each in self.complete if each.ended_s > last_sent_s), default=until_s)
        tokens = sum(each.tokens_until(until_s) for each in self.complete)
        return tokens / (until_s - min(each.sent_s for each in self.answers))

    def mean_ms(self, name: str) -> float | None:
        values = [value for each in self.complete if (value := getattr(each, name)) is not None]
        return 1000 * fmean(values) if values else None


def _turn(config: RatesConfig, facts: ServerFacts, case: Case, variant: str, number: int, *, key: str | None) -> Turn:
    warm_up = number == 0
    count = config.requests_of(case.load)
    if warm_up:
        count = min(count, max(1, case.load.clients))
    tokens = min(config.tokens, WARM_UP_TOKENS) if warm_up else config.tokens
    bodies = [
        request_body(
            facts.model,
            config.route(case.kind),
            prompt,
            tokens=tokens,
            fields=facts.fields,
            # No request finds a prompt in the prefix cache that was sent before, in this run or in an earlier one.
            salt=secrets.token_hex(8),
        )
        | config.variants[variant]
        for place, prompt in enumerate(config.prompts(case.kind, count))
    ]
    recorded: dict[int, Recorded] = {}
    connections = _Connections(facts.url, key)

    def send(place: int) -> None:
        recorded[place] = record(connections.of_this_thread(), config.route(case.kind), bodies[place])

    try:
        send_all(case.load, count, send, seed=config.seed)
    finally:
        connections.close()
    return Turn([read(recorded[place]) for place in range(count)], is_closed=case.load.is_closed)


class _Connections:
    """One connection for each thread, kept open between its requests."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._key = key
        self._local = threading.local()
        self._all: list[Client] = []

    def of_this_thread(self) -> Client:
        client: Client | None = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = Client(self._url, key=self._key)
            self._all.append(client)
        return client

    def close(self) -> None:
        for client in self._all:
            client.close()


# ---- what is reported ------------------------------------------------------------------------------

LATENCIES = (("ttft_ms", "ttft_s"), ("tpot_ms", "tpot_s"))


def _case_report(config: RatesConfig, case: Case, turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    return {
        "load": case.load.name,
        **case.load.as_json(),
        "text": case.kind,
        "requests": config.requests_of(case.load),
        "variants": {name: _figures(each) for name, each in turns.items()},
        "comparison": _comparison(turns[ON], turns[OFF]) if config.compare_speculation else None,
    }


def _figures(turns: Sequence[Turn]) -> dict[str, Any]:
    answers = [answer for turn in turns for answer in turn.answers]
    complete = [answer for turn in turns for answer in turn.complete]
    rates = [turn.tokens_per_s for turn in turns]
    known = [rate for rate in rates if rate is not None]
    failures = Counter(answer.failure for answer in answers if answer.failure is not None)
    return {
        "tokens_per_s": median(known) if known else None,
        "tokens_per_s_by_round": rates,
        "requests": len(answers),
        "output_tokens": sum(answer.tokens for answer in complete),
        "failures": dict(failures),
        "first_failure": next((f"{each.failure}: {each.detail}" for each in answers if each.failure is not None), None),
    } | {
        name: distribution([1000 * value for each in complete if (value := getattr(each, field)) is not None])
        for name, field in LATENCIES
    }


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Returns mean, median and 99th percentile; None of no values."""
    if not values:
        return None
    p99 = quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
    return {"mean": fmean(values), "p50": median(values), "p99": p99}


def _comparison(on: Sequence[Turn], off: Sequence[Turn]) -> dict[str, Any]:
    """Returns ratios of speculation to none, above 1 where speculation is better."""
    measures = [
        Measure("tokens_per_s", "tokens/s", more_is_better=True),
        Measure("ttft_ms", "ms", more_is_better=False),
        Measure("tpot_ms", "ms", more_is_better=False),
    ]
    differ = compared = 0
    for one, other in zip(on, off, strict=True):
        for measure, pair in zip(
            measures,
            (
                (other.tokens_per_s, one.tokens_per_s),
                *((other.mean_ms(field), one.mean_ms(field)) for _name, field in LATENCIES),
            ),
            strict=True,
        ):
            base, head = pair
            if base is not None and head is not None:
                measure.pairs.append((base, head))
        for mine, yours in zip(one.answers, other.answers, strict=True):
            if mine.failure is None and yours.failure is None:
                compared += 1
                differ += mine.text != yours.text
    return {measure.name: measure.as_json() for measure in measures if measure.pairs} | {
        "texts": compared,
        "texts_that_differ": differ,
    }


def _notes(config: RatesConfig, facts: ServerFacts, turns: Sequence[Turn]) -> list[str]:
    complete = [answer for turn in turns for answer in turn.complete]
    notes = []
    short = sum(answer.tokens < config.tokens for answer in complete)
    if "ignore_eos" not in facts.fields:
        notes.append("the server does not take ignore_eos: answers end where the model ends them")
    elif short and all(answer.counted_by_server for answer in complete):
        notes.append(f"{short} of {len(complete)} answers have fewer tokens than {config.tokens}")
    if "cache_salt" not in facts.fields:
        notes.append("the server does not take cache_salt: repeated prompts may be found in its prefix cache")
    if not all(answer.counted_by_server for answer in complete):
        notes.append(
            "the server does not say how many tokens it writes: events with text are counted, and an event may have "
            "several tokens"
        )
    return notes


def raise_if_nothing_worked(report: Mapping[str, Any]) -> None:
    """Raises the first failure if no request of the whole measurement was answered."""
    figures = [entry for case in report["cases"] for entry in case["variants"].values()]
    if all(entry["tokens_per_s"] is None for entry in figures):
        raise RequestError(f"no request was answered; the first one failed with {figures[0]['first_failure']}")


def any_failures(report: Mapping[str, Any]) -> bool:
    return any(entry["failures"] for case in report["cases"] for entry in case["variants"].values())
