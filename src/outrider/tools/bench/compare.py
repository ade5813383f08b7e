"""Two commits measured side by side: decoding, prompts, scheduler and KV manager, memory of a server.

The commits take turns within one run (A B, B A, A B, …), seconds apart, so that a slow minute of the machine touches
both alike. Each pair of turns yields one ratio; the ratio that is reported is the median of the pairs, and the spread
is the range of their middle half. Every ratio is HEAD to BASE and is turned so that above 1 is better.

Each round starts a new pair of worker processes for each kind of engine, because one process may be faster than
another of the same code by the luck of its memory layout. Only one of the two works at a time; the other one's
threads sleep. A worker runs a small program (compare_worker.py) that uses the public API alone, so BASE may be a
commit with other module paths.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

from outrider.errors import OutriderError
from outrider.tools.bench.busy import OtherLoad, how_busy, usable_cores
from outrider.tools.bench.checkouts import Checkout, Worker, checkouts, git
from outrider.tools.bench.comparison import BASE, HEAD, Comparison, table
from outrider.tools.bench.http_client import Client
from outrider.tools.bench.process_memory import tree_memory_mb
from outrider.tools.bench.server_process import ServerProcess
from outrider.tools.bench.texts import PROSE, QUESTIONS

PARTS = ("decode", "prompt", "kv", "memory")
ENGINES: Mapping[str, dict[str, Any] | None] = {"plain": None, "DFlash": {"method": "dflash"}}
BATCHES = (1, 8)
GENERATED_TOKENS = 128
PROMPT_LENGTHS = (512, 2048)
WARM_UP_TOKENS = 16
BUSY_CORES = 0.2
"""Cores that other programs may use, on average, before the report says that they did."""
IDLE_S = 3.0
"""Time that a server is given to settle before its memory is read."""
KV_REPEATS = 2
KV_FIGURES = (
    ("us_per_request_step", "all steps"),
    ("us_per_request_step_pure_decode", "pure decoding"),
    ("us_per_request_step_without_speculation", "no speculation"),
)
LOOKUP_FIGURES = (("total_fresh_ms", "new prompt of 32,768"), ("total_cached_ms", "cached prompt of 32,768"))


def sides_in_order(number: int) -> tuple[str, str]:
    """Each commit goes first in every other pair."""
    return (HEAD, BASE) if number % 2 else (BASE, HEAD)


# ---- the measurements ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    parts: tuple[str, ...]
    rounds: int
    turns: int
    """Pairs of turns that each case gets in each round."""
    model: str | None


def measure(plan: Plan, sides: Mapping[str, Checkout], progress: Callable[[str], None]) -> Comparison:
    comparison = Comparison()
    for number in range(plan.rounds):
        for name, speculation in ENGINES.items():
            if "decode" in plan.parts or "prompt" in plan.parts:
                progress(f"round {number + 1} of {plan.rounds}: {name}")
                _measure_engine(plan, number, name, speculation, sides, comparison)
        if "kv" in plan.parts:
            progress(f"round {number + 1} of {plan.rounds}: scheduler and KV manager")
            for turn in range(plan.turns):
                _measure_kv(number + turn, sides, comparison)
        if "memory" in plan.parts:
            progress(f"round {number + 1} of {plan.rounds}: an idle server")
            _measure_memory(plan, number, sides, comparison)
    return comparison


def _measure_engine(
    plan: Plan,
    number: int,
    name: str,
    speculation: dict[str, Any] | None,
    sides: Mapping[str, Checkout],
    comparison: Comparison,
) -> None:
    # Every turn repeats its prompts: with a prefix cache the later ones would be spared their prefill.
    settings: dict[str, Any] = {"speculative_config": speculation, "enable_prefix_caching": False}
    if plan.model is not None:
        settings["model"] = plan.model
    with ExitStack() as stack:
        workers = {}
        for side in sides_in_order(number):
            workers[side] = Worker(sides[side], settings)
            stack.callback(workers[side].close)
            # One after the other: two that load or compile at once take each other's cores.
            workers[side].wait_ready()
        for case, unit, prompts, max_tokens in _cases(plan, name, workers[BASE]):
            work = len(prompts) * max_tokens if max_tokens > 1 else len(prompts[0])
            request = {"prompts": prompts, "max_tokens": max_tokens}
            for side in sides_in_order(number):
                workers[side].ask({**request, "max_tokens": min(WARM_UP_TOKENS, max_tokens)})
            for turn in range(plan.turns):
                answers = {side: workers[side].ask(request) for side in sides_in_order(number + turn)}
                rates = {side: work / answer["seconds"] for side, answer in answers.items()}
                comparison.add(case, unit, rates, more_is_better=True)
                comparison.compare_texts({side: answer["token_ids"] for side, answer in answers.items()})


def _cases(plan: Plan, name: str, worker: Worker) -> Iterator[tuple[str, str, list[list[int]], int]]:
    """Name, unit, prompts and tokens to generate of each case. Both commits are given BASE's token ids."""
    if "decode" in plan.parts:
        questions = worker.ask({"questions": QUESTIONS[: max(BATCHES)]})["prompts"]
        for batch in BATCHES:
            yield f"decode, {name}, batch {batch}", "tokens/s", questions[:batch], GENERATED_TOKENS
    if "prompt" in plan.parts:
        for length in PROMPT_LENGTHS:
            text = " ".join(PROSE) * (1 + length // 256)
            prompts = worker.ask({"text": text, "num_tokens": length})["prompts"]
            assert len(prompts[0]) == length
            # The call ends with the first token, so this is the time to the first token, turned over.
            yield f"prompt of {length:,}, {name}", "prompt tokens/s", prompts, 1


def _measure_kv(number: int, sides: Mapping[str, Checkout], comparison: Comparison) -> None:
    reports = {}
    for side in sides_in_order(number):
        done = subprocess.run(
            [sys.executable, "-m", "outrider", "bench", "kv", "--json", "--repeats", str(KV_REPEATS)],
            env=sides[side].environment,
            cwd=sides[side].path,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise sides[side].failed("`outrider bench kv`", done.stderr)
        # This is plain Python whose every run does the same work: the fastest of several is the best estimate.
        reports[side] = json.loads(done.stdout)["best"]
    for figure, title in KV_FIGURES:
        pair = {side: report[figure] for side, report in reports.items()}
        comparison.add(f"kv, {title}", "µs a request-step", pair, more_is_better=False)
    for figure, title in LOOKUP_FIGURES:
        pair = {side: report["lookup_32k_ms"][figure] for side, report in reports.items()}
        comparison.add(f"kv, {title}", "ms", pair, more_is_better=False)


def _measure_memory(plan: Plan, number: int, sides: Mapping[str, Checkout], comparison: Comparison) -> None:
    idle, used = {}, {}
    options = [] if plan.model is None else ["--model", plan.model]
    for side in sides_in_order(number):
        server = ServerProcess(options, environment=sides[side].environment)
        try:
            server.wait_ready()
            sleep(IDLE_S)
            idle[side] = tree_memory_mb(server.process.pid)
            _ask_for_json(server, sides[side])
            sleep(IDLE_S)
            used[side] = tree_memory_mb(server.process.pid)
        finally:
            server.stop()
    comparison.add("memory of an idle server", "MB", idle, more_is_better=False)
    comparison.add("memory of a server after JSON", "MB", used, more_is_better=False)


def _ask_for_json(server: ServerProcess, side: Checkout) -> None:
    """Asks for JSON that obeys a schema, which needs everything that a server may load or start after its start."""
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
    client = Client(server.url)
    try:
        _, models = client.get("/v1/models")
        question = {
            "model": json.loads(models)["data"][0]["id"],
            "messages": [{"role": "user", "content": "Name a river."}],
            "max_tokens": 64,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "river", "schema": schema}},
        }
        status, answer = client.post("/v1/chat/completions", question)
    finally:
        client.close()
    if status != 200:
        raise side.failed("a request for JSON", json.dumps(answer))


# ---- the command -----------------------------------------------------------------------------------


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/compare",
        description="Measure two commits in turns and print the ratios of HEAD to BASE; above 1 is better. "
        "Takes some twenty minutes, with --quick four.",
    )
    parser.add_argument("base", help="commit to compare with")
    parser.add_argument("head", nargs="?", default="HEAD", help="commit to judge (default: HEAD, without local edits)")
    parser.add_argument("--quick", action="store_true", help="one round of fewer turns: a first look, noisier")
    parser.add_argument("--rounds", type=int, help="rounds, each with new processes (default: 3, with --quick 1)")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this part; may be repeated")
    parser.add_argument("--model", help="model to use instead of the default one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--least", type=float, metavar="RATIO", help="exit with status 1 if a ratio is below RATIO")
    arguments = parser.parse_args(given)
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def run(given: Sequence[str] | None = None) -> int:
    arguments = _arguments(given)
    notes = [busy] if (busy := how_busy()) is not None else []
    for note in notes:
        _note(note)
    other_load = OtherLoad()
    if arguments.head == "HEAD" and git("status", "--porcelain", "--untracked-files=no"):
        _note("there are uncommitted changes; they are not measured, only commits are")
    plan = Plan(
        parts=tuple(arguments.only or PARTS),
        rounds=arguments.rounds or (1 if arguments.quick else 3),
        turns=3 if arguments.quick else 5,
        model=arguments.model,
    )
    with checkouts({BASE: arguments.base, HEAD: arguments.head}) as sides:
        for side, checkout in sides.items():
            if missing := checkout.missing_packages():
                notes.append(f"{side.upper()} is measured without {', '.join(missing)}, which pip can install")
                _note(notes[-1])
        comparison = measure(plan, sides, lambda what: print(what, file=sys.stderr))
        commits = {side: checkout.commit for side, checkout in sides.items()}
    print(f"BASE {commits[BASE][:9]}, HEAD {commits[HEAD][:9]}; ratios above 1 are better")
    print(table(comparison))
    if comparison.texts:
        print(f"texts that differ: {comparison.texts_that_differ} of {comparison.texts}")
    others = other_load.cores()
    if others is not None and others > BUSY_CORES:
        notes.append(
            f"other programs kept {others:.1f} of {usable_cores()} cores busy: measure again when they are idle"
        )
    for note in notes:
        print(f"note: {note}")
    if arguments.json is not None:
        report = {
            "commits": commits,
            "notes": notes,
            "cores_used_by_others": others,
            "measures": [one.as_json() for one in comparison.measures.values()],
            "texts": comparison.texts,
            "texts_that_differ": comparison.texts_that_differ,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    slow = comparison.too_slow(arguments.least)
    for one in slow:
        print(f"{one.name}: {one.ratio:.3f} is below {arguments.least}", file=sys.stderr)
    return 1 if slow else 0


def main() -> None:
    try:
        sys.exit(run())
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
