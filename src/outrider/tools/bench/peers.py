"""Outrider beside llama.cpp and OpenVINO on a CPU, for `scripts/bench-peers`: the same file and prompts, in one run.

Every engine has a process of its own that stays loaded. The engines take turns (A B C D, B C D A, …), seconds apart,
so that a slow minute of the machine touches all alike; while one works, the others' threads sleep. In each turn an
engine generates one token and then many after the same prompts:

    decode    (tokens of the long call − tokens of the short one) / (their difference in time)
    prompt    tokens of a long prompt / time of the short call

Times are medians over the rounds. Engines keep their own defaults except for threads, which are equal, and
prefix caches, which are off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from outrider.errors import ConfigError, OutriderError
from outrider.models.resolve import DEFAULT_MODEL, ModelKind, resolve_model
from outrider.tools.bench.busy import how_busy, usable_cores
from outrider.tools.bench.json_worker import JsonWorker, program_path
from outrider.tools.bench.texts import PROSE, QUESTIONS

PLAIN = "outrider"
WORKER = "outrider.tools.bench.peers_worker"
WARM_UP_TOKENS = 8
LONGEST_QUESTION = 256
"""Upper bound of a question's tokens, chat template included."""


# ---- what was measured -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    name: str
    engine: str
    """The worker's name for the engine."""
    python: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    prompts: list[list[int]]
    max_tokens: int
    """1 measures the prompt, more measures decoding."""

    def rate(self, first_s: float, all_s: float) -> float | None:
        """Tokens per second, from the time to the first token and the time to the last one; None if other programs
        disturbed the measurement so much that the last token seems to come before the first."""
        if self.max_tokens == 1:
            return sum(map(len, self.prompts)) / first_s
        return len(self.prompts) * (self.max_tokens - 1) / (all_s - first_s) if all_s > first_s else None


@dataclass(slots=True)
class Figures:
    """What was measured of one engine."""

    times_s: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """For each case, the times to the first and to the last token in each round."""
    rates: dict[str, float | None] = field(default_factory=dict)
    """Tokens per second in each case."""
    texts: dict[str, list[list[int]]] = field(default_factory=dict)
    peak_mb: float = 0.0

    def add(self, case: Case, first: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        times = self.times_s.setdefault(case.name, [])
        times.append((first["seconds"], whole["seconds"]))
        self.rates[case.name] = case.rate(median(first_s for first_s, _ in times), median(all_s for _, all_s in times))
        self.texts[case.name] = whole["token_ids"]

    def as_json(self) -> dict[str, Any]:
        return {"tokens_per_s": self.rates, "first_and_last_token_s": self.times_s, "peak_mb": self.peak_mb}


def same_texts(one: Figures, other: Figures) -> tuple[int, int]:
    """Returns how many texts two engines generated alike, and of how many."""
    pairs = [pair for name in one.texts for pair in zip(one.texts[name], other.texts[name], strict=True)]
    return sum(mine == yours for mine, yours in pairs), len(pairs)


def table(found: Mapping[str, Figures]) -> str:
    names = list(next(iter(found.values())).rates)
    rows = [["tokens/s", *names, "peak MB", f"texts as {PLAIN}"]]
    for name, figures in found.items():
        alike, texts = same_texts(figures, found[PLAIN])
        rates = ["noise" if (rate := figures.rates[case]) is None else f"{rate:,.0f}" for case in names]
        rows.append([name, *rates, f"{figures.peak_mb:,.0f}", f"{alike} of {texts}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", *aligned]))
    return "\n".join(lines)


# ---- processes -------------------------------------------------------------------------------------


class Worker(JsonWorker):
    """A process that runs peers_worker.py for one contestant."""

    def __init__(self, contestant: Contestant) -> None:
        def failed(log: str) -> ConfigError:
            last = "\n".join(log.strip().splitlines()[-8:])
            return ConfigError(f"{contestant.name} failed; its log ends with:\n{last}")

        # By its path: the peers' environment does not have this package.
        settings = json.dumps(dict(contestant.settings))
        super().__init__([str(contestant.python), program_path(WORKER), contestant.engine, settings], failed=failed)

    def wait_ready(self) -> None:
        self.answer()


# ---- the measurement -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    rounds: int
    tokens: int
    batches: tuple[int, ...]
    prompt_tokens: int


def cases(plan: Plan, tokenizer: Worker) -> Iterator[Case]:
    """All engines are given the token ids of Outrider's tokenizer."""
    questions = [QUESTIONS[number % len(QUESTIONS)] for number in range(max(plan.batches))]
    prompts = tokenizer.ask({"questions": questions})["prompts"]
    for batch in plan.batches:
        yield Case(name=f"batch {batch}", prompts=prompts[:batch], max_tokens=plan.tokens)
    text = " ".join(PROSE) * (1 + plan.prompt_tokens // 256)
    prompts = tokenizer.ask({"text": text, "num_tokens": plan.prompt_tokens})["prompts"]
    yield Case(name=f"prompt of {plan.prompt_tokens:,}", prompts=prompts, max_tokens=1)


def measure(plan: Plan, contestants: Sequence[Contestant], told: Callable[[str], None]) -> dict[str, Figures]:
    """Returns the figures of every engine that works here; `told` hears of the others, and of the progress."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for contestant in contestants:
            told(f"loading {contestant.name}")
            worker = Worker(contestant)
            stack.callback(worker.close)
            try:
                # One after the other: two that load or compile at once take each other's cores.
                worker.wait_ready()
            except ConfigError as problem:
                if contestant.name == PLAIN:
                    raise
                told(f"note: {problem}")
                continue
            workers[contestant.name] = worker
        found = {name: Figures() for name in workers}
        to_run = list(cases(plan, workers[PLAIN]))
        for number in range(-1, plan.rounds):
            told("warming up" if number < 0 else f"round {number + 1} of {plan.rounds}")
            order = [*workers][max(number, 0) % len(workers) :] + [*workers][: max(number, 0) % len(workers)]
            for case in to_run:
                for name in order:
                    _turn(workers[name], case, found[name] if number >= 0 else None)
        for name, worker in workers.items():
            found[name].peak_mb = worker.ask({"memory": True})["peak_mb"]
    return found


def _turn(worker: Worker, case: Case, figures: Figures | None) -> None:
    request = {"prompts": case.prompts, "max_tokens": 1}
    first = worker.ask(request)
    tokens = case.max_tokens if figures is not None else min(case.max_tokens, WARM_UP_TOKENS)
    whole = first if tokens == 1 else worker.ask({**request, "max_tokens": tokens})
    if figures is not None:
        figures.add(case, first, whole)


# ---- the command -----------------------------------------------------------------------------------


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench-peers",
        description="Measure llama.cpp, OpenVINO and Outrider, plain and with DFlash, on one GGUF file, in turns "
        "within one run. The first start installs the peers into .venv-peers and compiles llama.cpp for this "
        "processor, which takes several minutes.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"a GGUF file (default: that of {DEFAULT_MODEL})")
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='how Outrider drafts (default: {"method": "dflash"} for the default model, n-grams for any other)',
    )
    parser.add_argument("--batch", type=int, action="append", help="texts at a time; may be repeated (default: 1, 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate for each text (default: 128)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="length of the long prompt (default: 512)")
    parser.add_argument("--rounds", type=int, default=5, help="how often everything runs (default: 5)")
    parser.add_argument("--num-threads", type=int, help="threads of each engine (default: one per usable core)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--peers-python", type=Path, required=True, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    for name, least in (("tokens", 2), ("prompt_tokens", 1), ("rounds", 1), ("num_threads", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if arguments.batch and min(arguments.batch) < 1:
        parser.error("--batch must be at least 1")
    return arguments


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f'--speculative-config takes a JSON object such as {{"method": "ngram"}}, got {text!r}')
    return value


def contestants_of(arguments: argparse.Namespace, threads: int) -> list[Contestant]:
    model = resolve_model(arguments.model)
    if model.kind is not ModelKind.GGUF:
        raise ConfigError(f"{model.path} is not a GGUF file, which is the only format that all these engines read")
    batches = arguments.batch or [1, 8]
    longest = max(arguments.prompt_tokens, LONGEST_QUESTION) + arguments.tokens
    shared = {"model": str(model.path.resolve()), "threads": threads, "batch": max(batches), "longest": longest}
    usual = {"method": "dflash" if arguments.model == DEFAULT_MODEL else "ngram"}
    drafting = usual if arguments.speculative_config is None else _object(arguments.speculative_config)
    # By its name, so that the drafter made for it is found.
    own = {**shared, "model": arguments.model}
    here = Path(sys.executable)
    return [
        Contestant(name="llama.cpp", engine="llama.cpp", python=arguments.peers_python, settings=shared),
        Contestant(name="openvino", engine="openvino", python=arguments.peers_python, settings=shared),
        Contestant(name=PLAIN, engine="outrider", python=here, settings={**own, "speculative_config": None}),
        Contestant(
            name=f"{PLAIN}, {drafting.get('method')}",
            engine="outrider",
            python=here,
            settings={**own, "speculative_config": drafting},
        ),
    ]


def run(given: Sequence[str] | None = None) -> int:
    arguments = _arguments(given)
    busy = how_busy()
    if busy is not None:
        print(f"note: {busy}", file=sys.stderr)
    threads = arguments.num_threads or usable_cores()
    plan = Plan(
        rounds=arguments.rounds,
        tokens=arguments.tokens,
        batches=tuple(arguments.batch or (1, 8)),
        prompt_tokens=arguments.prompt_tokens,
    )
    found = measure(plan, contestants_of(arguments, threads), lambda what: print(what, file=sys.stderr))
    print(f"{threads} threads, {plan.tokens} tokens after each question, medians of {plan.rounds} rounds")
    print(table(found))
    if busy is not None:
        print(f"note: {busy}")
    if arguments.json is not None:
        report = {
            "model": arguments.model,
            "threads": threads,
            "tokens": plan.tokens,
            "note": busy,
            "engines": {name: figures.as_json() for name, figures in found.items()},
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def main() -> None:
    try:
        sys.exit(run())
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
