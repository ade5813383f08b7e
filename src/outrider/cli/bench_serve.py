"""`outrider bench serve`: the cost of HTTP, and what a server still holds after a load."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from outrider.cli.drafter_options import with_default_speculation
from outrider.cli.engine_options import (
    AsJson,
    EngineOptions,
    ModelOptions,
    PositionalModel,
    chosen_model,
    engine_config,
)
from outrider.cli.grouped import grouped, panel
from outrider.cli.terminal import errors, loading, note, out
from outrider.config import EngineConfig
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.tools.bench.server_process import ServerProcess

measured_option = panel("What is measured")
load_option = panel("Load")
LOAD_KV_BYTES = 256 << 20

SERVE_BENCH_HELP = (
    "Measure what HTTP costs, or put a server under load.\n\n"
    "Runs the same requests, one at a time, in this process and over HTTP through a server that it starts, in turns. "
    "Reports tokens per second, time to the first token, and whether the texts are the same. With [bold]--load[/bold], "
    "many clients send random requests instead; some requests are malformed, some clients disconnect early, and the "
    "engine process is killed in between. Afterwards no page, memory or file may be left in use.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench serve\n\n"
    "  outrider bench serve --load --minutes 5 --clients 32 --sanitizer raise"
)


@grouped
def bench_serve(
    *,
    positional: PositionalModel = None,
    prompt_tokens: Annotated[int, measured_option(min=1, help="Length of each prompt.")] = 64,
    tokens: Annotated[int, measured_option(min=2, help="Tokens to generate for each prompt.")] = 128,
    rounds: Annotated[int, measured_option(min=1, help="Rounds; medians are reported.")] = 7,
    load: Annotated[bool, load_option("--load", help="Put the server under load instead.")] = False,
    clients: Annotated[int, load_option(min=1, help="Clients at once.")] = 32,
    minutes: Annotated[float, load_option(help="Duration of the load.")] = 1.0,
    kills: Annotated[int, load_option(min=0, help="How often the engine process is killed.")] = 1,
    seed: Annotated[int, load_option(help="Seed of the clients' random requests.")] = 0,
    as_json: AsJson = False,
    model: ModelOptions,
    engine: EngineOptions,
) -> None:
    name = chosen_model(positional, model)
    engine = with_default_speculation(engine, name)
    config = engine_config(name, model, engine)
    if load:
        report = _load(config, clients=clients, minutes=minutes, kills=kills, seed=seed)
    else:
        report = _overhead(config, prompt_tokens=prompt_tokens, tokens=tokens, rounds=rounds)
    if as_json:
        typer.echo(json.dumps(report))
    elif load:
        _print_load(report)
    else:
        _print_overhead(report)
    if load and report["problems"]:
        raise typer.Exit(1)


def serve_options(config: EngineConfig) -> list[str]:
    """Returns the options of `outrider serve` that start a server with the same engine."""
    options = [config.model]
    defaults = EngineConfig()
    for field in (
        *("dtype", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"),
        *("kv_cache_memory_bytes", "gpu_memory_utilization", "sanitizer", "sanitizer_level", "num_threads", "backend"),
    ):
        value = getattr(config, field)
        if value != getattr(defaults, field):
            options += [f"--{field.replace('_', '-')}", str(value)]
    if config.expand_weights:
        options.append("--expand-weights")
    if not config.enable_prefix_caching:
        options.append("--no-enable-prefix-caching")
    if config.speculative_config is None:
        return [*options, "--no-speculation"]
    given = config.speculative_config
    fields = {name: getattr(given, name) for name in given.__slots__ if getattr(given, name) is not None}
    return [*options, "--speculative-config", json.dumps(fields)]


def _start(config: EngineConfig, *more: str) -> ServerProcess:
    from outrider.tools.bench.server_process import ServerProcess

    errors.print("starting a server …", style="dim")
    server = ServerProcess([*serve_options(config), *more])
    server.wait_ready()
    return server


def _overhead(config: EngineConfig, *, prompt_tokens: int, tokens: int, rounds: int) -> dict[str, Any]:
    from outrider.engine.build import build_engine
    from outrider.tools.bench.busy import THREADS_ADVICE, how_busy
    from outrider.tools.bench.http_client import Client
    from outrider.tools.bench.serve import ServeBenchConfig, measure

    bench = ServeBenchConfig(engine=config, prompt_tokens=prompt_tokens, tokens=tokens, rounds=rounds)
    busy = how_busy(THREADS_ADVICE)
    note(busy)
    with loading() as progress:
        offline = build_engine(config, progress=progress)
    server = _start(config, "--log-interval", "0")
    try:
        return measure(bench, offline, Client(server.url), lambda what: errors.print(f"{what} …", style="dim")) | {
            "busy": busy
        }
    finally:
        server.stop()


def _load(config: EngineConfig, *, clients: int, minutes: float, kills: int, seed: int) -> dict[str, Any]:
    from outrider.tools.bench.load import ADMIN_KEY, LoadConfig, run_load

    load = LoadConfig(clients=clients, minutes=minutes, kills=kills, seed=seed)
    if config.sanitizer == "off":
        raise ConfigError("a load without the sanitizer proves little; give --sanitizer raise or --sanitizer log")
    if config.kv_cache_memory_bytes is None:
        # So little that pages run out, and that every page has been touched before memory is measured.
        config = replace(config, kv_cache_memory_bytes=LOAD_KV_BYTES)
    server = _start(config, "--admin-key", ADMIN_KEY)
    try:
        report = run_load(server, load)
    finally:
        status = server.stop()
    if status:
        report["problems"].append(f"the server ended with status {status}")
    return report


def _print_overhead(report: dict[str, Any]) -> None:
    out.print(
        f"Medians of {report['texts']} rounds, offline and over HTTP in turns; the ratio and the difference are "
        "medians too."
    )
    out.print(
        f"  tokens/s     {report['http_tokens_per_s']:.1f} over HTTP, {report['offline_tokens_per_s']:.1f} offline: "
        f"{report['ratio']:.1%}"
    )
    out.print(
        f"  first token  {report['http_ttft_ms']:.1f} ms over HTTP, {report['offline_ttft_ms']:.1f} ms offline: "
        f"{report['ttft_overhead_ms']:+.1f} ms"
    )
    out.print(
        f"               of which {report['ttft_outside_ms']:.1f} ms outside the engine, "
        f"{report['ttft_queued_ms']:.1f} ms "
        "in its queue"
    )
    differ = report["texts_that_differ"]
    out.print(
        Text(
            f"The texts are the same in {report['texts'] - differ} of {report['texts']} rounds.",
            style="red" if differ else "",
        )
    )


def _print_load(report: dict[str, Any]) -> None:
    out.print(f"{report['requests']:,} requests by {report['clients']} clients in {report['minutes']:g} min")
    for name, count in report["statuses"].items():
        out.print(f"  {name}: {count:,}")
    out.print(
        f"  {report['left_early']:,} clients disconnected early, {report['streams_cut']:,} streams were cut off by "
        "a killed engine"
    )
    if report["recovery_s"] is not None:
        out.print(f"Killed {report['kills']}×; served again after {report['recovery_s']:.1f} s at most.")
    out.print(
        f"Growth of {report['processes_measured']} processes: at most {report['memory_growth_mb']:.1f} MB, "
        f"{report['files_growth']} files."
    )
    if report["problems"]:
        for problem in report["problems"]:
            out.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
    else:
        out.print("No status 500, no page left in use, no finding of the sanitizer.", style="green")
