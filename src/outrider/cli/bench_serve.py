"""`outrider bench serve`: the cost of HTTP, speed under several loads, and what a server still holds after a load."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from outrider.cli.bench_serve_rates import (
    DEFAULT_ROUNDS,
    QUICK_ROUNDS,
    QUICK_TOKENS,
    ServerLoadOptions,
    measure_server,
    print_rates,
    rates_config,
)
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
from outrider.models.resolve import DEFAULT_MODEL

if TYPE_CHECKING:
    from outrider.tools.bench.serve_rates import RatesConfig
    from outrider.tools.bench.server_process import ServerProcess

measured_option = panel("What is measured")
load_option = panel("Load")
LOAD_KV_BYTES = 256 << 20
DEFAULT_OVERHEAD_TOKENS, DEFAULT_OVERHEAD_ROUNDS = 128, 7

SERVE_BENCH_HELP = (
    "Measure a server: its speed under several loads, what HTTP costs, or what is left after a load.\n\n"
    "Runs the same requests, one at a time, in this process and over HTTP through a server that it starts, in turns. "
    "Reports tokens per second, time to the first token, and whether the texts are the same. With [bold]--load[/bold], "
    "many clients send random requests instead; some requests are malformed, some clients disconnect early, and the "
    "engine process is killed in between. Afterwards no page, memory or file may be left in use.\n\n"
    "With [bold]--url[/bold] or [bold]--concurrency[/bold] it reports tokens per second, time to the first token, "
    "time per token and failed requests under each of several loads, of any server that speaks OpenAI's API. Requests "
    "come from clients that wait for their answers ([bold]--concurrency[/bold]), at random ([bold]--rate[/bold]) or in "
    "bursts ([bold]--burst[/bold]). [bold]--compare-speculation[/bold] sends everything to one of Outrider's servers "
    "with speculation and without, in turns.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider bench serve\n\n"
    "  outrider bench serve --url http://127.0.0.1:8000 --concurrency 1,2,4,8,16\n\n"
    "  outrider bench serve --compare-speculation --burst 8/2.0 --quick\n\n"
    "  outrider bench serve --load --minutes 5 --clients 32 --sanitizer raise"
)


@grouped
def bench_serve(
    *,
    positional: PositionalModel = None,
    prompt_tokens: Annotated[int, measured_option(min=1, help="Length of each prompt.")] = 64,
    tokens: Annotated[
        int | None,
        measured_option(
            min=2,
            help=f"Tokens to generate for each prompt. Default {DEFAULT_OVERHEAD_TOKENS}; {QUICK_TOKENS} with --quick.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        measured_option(
            min=1,
            help=f"Rounds. Default {DEFAULT_OVERHEAD_ROUNDS}; under several loads {DEFAULT_ROUNDS}, with --quick "
            f"{QUICK_ROUNDS}.",
        ),
    ] = None,
    load: Annotated[bool, load_option("--load", help="Put the server under load instead.")] = False,
    clients: Annotated[int, load_option(min=1, help="Clients at once.")] = 32,
    minutes: Annotated[float, load_option(help="Duration of the load.")] = 1.0,
    kills: Annotated[int, load_option(min=0, help="How often the engine process is killed.")] = 1,
    seed: Annotated[int, load_option(help="Seed of the clients' random requests, and of arrivals at random.")] = 0,
    as_json: AsJson = False,
    server: ServerLoadOptions,
    model: ModelOptions,
    engine: EngineOptions,
) -> None:
    if load and server.is_wanted:
        raise ConfigError(
            "--load excludes the options of a server under several loads (--url, --concurrency, …); leave it out"
        )
    name = chosen_model(positional, model)
    if server.is_wanted:
        rates = rates_config(server, prompt_tokens=prompt_tokens, tokens=tokens, rounds=rounds, seed=seed)
        if server.url is None:
            config = engine_config(name, model, with_default_speculation(engine, name))
            report = _rates_of_own_server(config, rates)
        else:
            _refuse_engine_options(model, engine)
            # The default is no wish: the server may have another model.
            wanted = None if name == DEFAULT_MODEL else name
            report = measure_server(rates, server.url, model=wanted, key=server.api_key)
        _finish_rates(report, as_json=as_json)
        return
    engine = with_default_speculation(engine, name)
    config = engine_config(name, model, engine)
    if load:
        report = _load(config, clients=clients, minutes=minutes, kills=kills, seed=seed)
    else:
        report = _overhead(
            config,
            prompt_tokens=prompt_tokens,
            tokens=tokens or DEFAULT_OVERHEAD_TOKENS,
            rounds=rounds or DEFAULT_OVERHEAD_ROUNDS,
        )
    if as_json:
        typer.echo(json.dumps(report))
    elif load:
        _print_load(report)
    else:
        _print_overhead(report)
    if load and report["problems"]:
        raise typer.Exit(1)


def _refuse_engine_options(model: ModelOptions, engine: EngineOptions) -> None:
    if engine != EngineOptions() or replace(model, model=DEFAULT_MODEL) != ModelOptions():
        raise ConfigError("options of the engine are for a server that is started here; leave them out, or --url")


def _rates_of_own_server(config: EngineConfig, rates: RatesConfig) -> dict[str, Any]:
    server = _start(config, "--log-interval", "0")
    try:
        return measure_server(rates, server.url, model=None, key=None)
    finally:
        server.stop()


def _finish_rates(report: dict[str, Any], *, as_json: bool) -> None:
    from outrider.tools.bench.serve_rates import any_failures

    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_rates(report)
    if any_failures(report):
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
