"""`outrider bench serve`: what HTTP costs, and what is left after a load."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from outrider.api.cli.default_speculation import with_default_speculation
from outrider.api.cli.engine_options import EngineOptions, ModelOptions, chosen_model
from outrider.api.cli.grouped import grouped
from outrider.api.cli.terminal import errors, loading, out
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.server_process import ServerProcess

MEASURED = "What is measured"
LOAD = "Load instead"
LOAD_KV_BYTES = 256 << 20

SERVE_BENCH_HELP = (
    "Measure what HTTP costs, or put a server under load.\n\n"
    "The same requests, one at a time, run offline in this process and through a server that is started for it, in "
    "turns: tokens per second, time to the first token, and whether the texts are the same. With [bold]--load"
    "[/bold], many clients send random requests instead, some malformed, some leave early, and the engine is killed "
    "on the way; then it is counted what is left of them. That should be nothing.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench serve\n\n"
    "  outrider bench serve --load --minutes 5 --clients 32 --sanitizer raise"
)


@grouped
def bench_serve(
    *,
    positional: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.", rich_help_panel=MEASURED)] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.", rich_help_panel=MEASURED)] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Medians over so many.", rich_help_panel=MEASURED)] = 7,
    load: Annotated[bool, typer.Option("--load", help="Put it under load.", rich_help_panel=LOAD)] = False,
    clients: Annotated[int, typer.Option(min=1, help="At once.", rich_help_panel=LOAD)] = 32,
    minutes: Annotated[float, typer.Option(help="How long.", rich_help_panel=LOAD)] = 1.0,
    kills: Annotated[
        int, typer.Option(min=0, help="How often the engine is killed on the way.", rich_help_panel=LOAD)
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of what clients do.", rich_help_panel=LOAD)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")] = False,
    model: ModelOptions,
    engine: EngineOptions,
) -> None:
    name = chosen_model(positional, model)
    engine = with_default_speculation(engine, name)
    settings = model.settings() | engine.settings() | {"model": name}
    settings["speculative_config"] = SpeculativeConfig.of(settings["speculative_config"])
    config = EngineConfig(**settings)
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
    """The command line that starts a server with the same engine."""
    options = [config.model]
    defaults = EngineConfig()
    for field in (
        *("dtype", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"),
        *("kv_cache_memory_bytes", "gpu_memory_utilization", "sanitizer", "sanitizer_level", "num_threads", "ops"),
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
    from outrider.bench.server_process import ServerProcess

    errors.print("starting a server …", style="dim")
    server = ServerProcess([*serve_options(config), *more])
    server.wait_ready()
    return server


def _overhead(config: EngineConfig, *, prompt_tokens: int, tokens: int, rounds: int) -> dict[str, Any]:
    from outrider.bench.busy import OF_THREADS, how_busy
    from outrider.bench.http_client import Client
    from outrider.bench.serve import ServeBenchConfig, measure
    from outrider.engine.build import build_engine

    bench = ServeBenchConfig(engine=config, prompt_tokens=prompt_tokens, tokens=tokens, rounds=rounds)
    busy = how_busy(OF_THREADS)
    if busy is not None:
        errors.print(Text(f"note: {busy}", style="yellow"), soft_wrap=True)
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
    from outrider.bench.load import ADMIN_KEY, LoadConfig, run_load

    load = LoadConfig(clients=clients, minutes=minutes, kills=kills, seed=seed)
    if config.sanitizer == "off":
        raise ConfigError("a load without the sanitizer proves little; give --sanitizer raise, or log")
    if config.kv_cache_memory_bytes is None:
        # Little enough that pages run out, and that all of them have been touched before memory is measured.
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
    out.print(f"Medians of {report['texts']} rounds, offline and over HTTP in turns; ratio and difference by round.")
    out.print(
        f"  tokens/s     {report['http_tokens_per_s']:.1f} over HTTP, {report['offline_tokens_per_s']:.1f} offline: "
        f"{report['ratio']:.1%}"
    )
    out.print(
        f"  first token  {report['http_ttft_ms']:.1f} ms over HTTP, {report['offline_ttft_ms']:.1f} ms offline: "
        f"{report['ttft_overhead_ms']:+.1f} ms"
    )
    out.print(
        f"               of it {report['ttft_outside_ms']:.1f} ms on the way, {report['ttft_queued_ms']:.1f} ms "
        "before its first step"
    )
    differ = report["texts_that_differ"]
    out.print(
        Text(f"Texts are the same in {report['texts'] - differ} of {report['texts']}.", style="red" if differ else "")
    )


def _print_load(report: dict[str, Any]) -> None:
    out.print(f"{report['requests']:,} requests by {report['clients']} clients in {report['minutes']:g} min")
    for name, count in report["statuses"].items():
        out.print(f"  {name}: {count:,}")
    out.print(f"  {report['left_early']:,} left early, {report['streams_cut']:,} were cut off by a killed engine")
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
        out.print("No 500, no page left, nothing that the sanitizer saw.", style="green")
