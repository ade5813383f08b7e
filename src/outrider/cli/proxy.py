"""`outrider proxy`: one address in front of prefill and decode workers."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from outrider.cli.engine_options import byte_count
from outrider.cli.grouped import grouped, panel
from outrider.cli.terminal import errors
from outrider.errors import ConfigError
from outrider.proxy.config import ProxyConfig
from outrider.server.config import DEFAULT_HOST, DEFAULT_PORT
from outrider.tools.wording import counted

if TYPE_CHECKING:
    from outrider.proxy.workers import Worker, Workers

PROXY_HELP = (
    "Serve several workers at one address: prompts are computed by prefill workers, answers written by decode "
    "workers.\n\n"
    "The workers are started with outrider serve --kv-transfer-config. If a worker fails, another one takes its place; "
    "if no prefill worker is left, the decode workers compute the prompts. SIGTERM and Ctrl-C let running requests "
    "finish before the proxy ends; a second signal ends it at once.\n\n"
    "[dim]Example:[/dim]\n\n"
    "  outrider proxy --prefill http://p:8000 --decode http://d:8000"
)

worker_option = panel("Workers and address")
limit_option = panel("Limits")

_DEFAULTS = ProxyConfig(prefill=("http://p",), decode=("http://d",))


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    prefill: Annotated[
        list[str] | None, worker_option(help="URL of a worker that computes prompts; may be repeated.", metavar="URL")
    ] = None
    decode: Annotated[
        list[str] | None, worker_option(help="URL of a worker that writes answers; may be repeated.", metavar="URL")
    ] = None
    host: Annotated[str, worker_option(help="Address to listen on; 0.0.0.0 means all addresses of this machine.")] = (
        DEFAULT_HOST
    )
    port: Annotated[int, worker_option(help="Port to listen on; 0 means any free port.")] = DEFAULT_PORT
    allowed_hosts: Annotated[
        list[str] | None,
        worker_option(
            "--allowed-host",
            help="Further host name that a proxy on this machine's own address answers to; may be repeated.",
            metavar="NAME",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ProxyLimitOptions:
    prompt_characters_min: Annotated[
        int,
        limit_option("--min-prompt-characters", help="Prompts with fewer characters go to a decode worker directly."),
    ] = _DEFAULTS.prompt_characters_min
    body_bytes_max: Annotated[
        int,
        limit_option(
            "--max-body-bytes",
            help="Largest body of a request. [dim]\\[default: 4M][/dim]",
            parser=byte_count,
            metavar="BYTES",
            show_default=False,
        ),
    ] = _DEFAULTS.body_bytes_max
    requests_max: Annotated[int, limit_option("--max-requests", help="Most requests that are open at a time.")] = (
        _DEFAULTS.requests_max
    )
    prefill_limit_s: Annotated[
        float,
        limit_option(
            "--prefill-limit", help="Seconds in which a prefill worker must answer, before another one is asked."
        ),
    ] = _DEFAULTS.prefill_limit_s
    request_limit_s: Annotated[float, limit_option("--request-limit", help="Seconds for one request.")] = (
        _DEFAULTS.request_limit_s
    )
    idle_limit_s: Annotated[
        float, limit_option("--idle-limit", help="Seconds for which a client may send and receive nothing.")
    ] = _DEFAULTS.idle_limit_s
    health_interval_s: Annotated[
        float, limit_option("--health-interval", help="Seconds between two questions to a worker whether it serves.")
    ] = _DEFAULTS.health_interval_s
    drain_limit_s: Annotated[
        float, limit_option("--drain-limit", help="Seconds for which requests may go on after SIGTERM.")
    ] = _DEFAULTS.drain_limit_s


@grouped
def proxy(*, workers: WorkerOptions, limits: ProxyLimitOptions) -> None:
    for name in ("prefill", "decode"):
        if not getattr(workers, name):
            raise ConfigError(
                f"a proxy needs at least one {name} worker; give its URL with --{name}, such as "
                f"--{name} http://127.0.0.1:8100"
            )
    lists = {name: tuple(getattr(workers, name) or ()) for name in ("prefill", "decode", "allowed_hosts")}
    config = ProxyConfig(**vars(workers) | vars(limits) | lists)

    from outrider.proxy.run import serve_proxy

    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")

    def announce(url: str, found: Workers) -> None:
        # The proxy works all the same where stderr is on a full disk or a closed pipe.
        with suppress(OSError, SystemExit):
            _announce(url, found, config)

    serve_proxy(config, announce)


def _announce(url: str, workers: Workers, config: ProxyConfig) -> None:
    parts = [_ready(workers.prefill, "prefill worker"), _ready(workers.decode, "decode worker")]
    needs_key = any(worker.needs_key for worker in workers.all)
    parts.append("API keys as the workers want them" if needs_key else "no API key needed")
    errors.print(
        Text(f"serving {counted(len(workers.all), 'worker')}", style="bold")
        + Text(f" at {url}/v1 · {' · '.join(parts)}"),
        soft_wrap=True,
    )
    if not needs_key and not config.is_loopback:
        errors.print(
            Text(
                "warning: any client that can reach this machine is served; give the workers --api-key", style="yellow"
            ),
            soft_wrap=True,
        )


def _ready(workers: list[Worker], one: str) -> str:
    from outrider.proxy.workers import State

    ready = sum(worker.state is State.READY for worker in workers)
    return f"{ready} of {counted(len(workers), one)} ready"
