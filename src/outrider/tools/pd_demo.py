"""A prefill worker, a decode worker and a proxy on this machine, for `scripts/demo-pd`: what moves, how fast, and that
the text stays right when the prefill worker is killed."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console

    from outrider.tools.bench.server_process import ServerProcess

INTERRUPTED_EXIT_STATUS = 130
CHAT = "/v1/chat/completions"
KV_BYTES = "256M"
NOTES = 16
ANSWER_TOKENS = 60
STOP_LIMIT_S = 20.0
PROMPT_SECONDS = "outrider:proxy_prompt_seconds_sum"


def main() -> None:
    # An interrupt in the middle of an import cannot be handled by the code that is being imported.
    signal.signal(signal.SIGINT, _exit_at_once)
    from rich.console import Console

    from outrider.errors import OutriderError
    from outrider.tools.bench import server_process, texts

    assert server_process and texts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        is_right = show(Console(highlight=False), _arguments())
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED_EXIT_STATUS) from None
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(0 if is_right else 1)


def _exit_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED_EXIT_STATUS)


def _arguments() -> list[str]:
    parser = argparse.ArgumentParser(
        prog="scripts/demo-pd", description=__doc__, epilog="Further options go to both workers: outrider serve --help."
    )
    return parser.parse_known_args()[1]


# ---- processes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    prefill: ServerProcess
    decode: ServerProcess
    proxy: ServerProcess


@contextmanager
def running(console: Console, options: list[str]) -> Iterator[Cluster]:
    """Starts the three processes; ends them, however the block ends."""
    from outrider.tools.bench.server_process import ServerProcess

    started: list[ServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="outrider-demo-") as directory:
        key = Path(directory) / "cluster-key"
        key.touch(mode=0o600)
        key.write_text(secrets.token_urlsafe(32), encoding="ascii")
        try:
            with console.status("starting a prefill worker and a decode worker"):
                for role in ("kv_producer", "kv_consumer"):
                    config = json.dumps({"kv_connector": "nixl", "kv_role": role})
                    given = ["--kv-transfer-config", config, "--cluster-key", f"@{key}"]
                    started.append(ServerProcess([*given, "--kv-cache-memory-bytes", KV_BYTES, *options]))
                for worker in started:
                    worker.wait_ready()
                prefill, decode = started
                started.append(ServerProcess(["--prefill", prefill.url, "--decode", decode.url], command="proxy"))
                started[-1].wait_ready()
            yield Cluster(prefill, decode, started[-1])
        finally:
            _stop(started)


def _stop(processes: list[ServerProcess]) -> None:
    """End all processes; at once, if the user does not want to wait."""
    try:
        for each in processes:
            if each.process.poll() is None:
                each.process.terminate()
        deadline_s = time.monotonic() + STOP_LIMIT_S
        for each in processes:
            with suppress(Exception):
                each.process.wait(max(0.1, deadline_s - time.monotonic()))
    finally:
        for each in processes:
            if each.process.poll() is None:
                each.process.kill()


def kill(worker: ServerProcess) -> None:
    """End a worker as a failing machine does: its front end and its engine at once."""
    pids = [pid for found in worker.children().values() for pid in found]
    for pid in (worker.process.pid, *pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    worker.process.wait(STOP_LIMIT_S)


# ---- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Said:
    text: str
    first_s: float
    """From sending the request to the first word."""
    usage: dict[str, Any]
    metrics: dict[str, Any]

    @property
    def moved(self) -> dict[str, Any] | None:
        moved: dict[str, Any] | None = self.metrics.get("kv_transfer")
        return moved


def prompt_of(first: int) -> str:
    """A prompt of several thousand characters; those with another first note have no beginning in common."""
    from outrider.tools.bench.texts import PROSE

    notes = [f"Note {first + place}. {PROSE[(first + place) % len(PROSE)]}" for place in range(NOTES)]
    return "\n\n".join([*notes, "Which of these notes do you like best, and why? Answer in three sentences."])


def ask(url: str, prompt: str, console: Console | None = None, **fields: Any) -> Said:
    """Streams an answer, and prints it as it comes if there is a console."""
    from outrider.errors import OutriderError
    from outrider.tools.bench.http_client import Client

    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream_options": {"include_usage": True},
        **fields,
    }
    client = Client(url)
    pieces, last, began_s, first_s = [], {}, time.perf_counter(), 0.0
    try:
        stream = client.stream(CHAT, body)
        if stream.status != 200:
            raise OutriderError(f"{url} answered {stream.status}")
        for last in stream.events():
            if "error" in last:
                raise OutriderError(f"{url}: {last['error']['message']}")
            for choice in last["choices"]:
                piece = choice["delta"].get("content") or ""
                first_s = first_s or (time.perf_counter() - began_s if piece else 0.0)
                pieces.append(piece)
                if console is not None:
                    console.file.write(piece)
                    console.file.flush()
    finally:
        client.close()
    if console is not None:
        console.print()
    return Said(text="".join(pieces), first_s=first_s, usage=last["usage"], metrics=last["metrics"])


def prompt_seconds(proxy: ServerProcess) -> float:
    """Returns how long prefill workers have taken for prompts altogether."""
    from outrider.tools.bench.http_client import Client

    client = Client(proxy.url)
    try:
        _status, text = client.get("/metrics")
    finally:
        client.close()
    return next(float(line.split(" ")[1]) for line in text.splitlines() if line.startswith(PROMPT_SECONDS))


# ---- the demonstration -----------------------------------------------------------------------------


def show(console: Console, options: list[str]) -> bool:
    """Shows both parts. Returns whether every text was that of a single worker."""
    console.print(
        "A prefill worker computes prompts, a decode worker writes the answers, and a proxy stands in front of them. "
        "The prompt's KV cache moves from one process to the other.\n"
    )
    began_s = time.monotonic()
    with running(console, options) as cluster:
        console.print(f"ready after {time.monotonic() - began_s:.0f} s", style="dim")
        for name in ("prefill", "decode", "proxy"):
            console.print(f"  {name:<8} {getattr(cluster, name).url}", style="dim")
        return _hand_off(console, cluster) & _without_prefill(console, cluster)


def _hand_off(console: Console, cluster: Cluster) -> bool:
    # Workers meet at their first hand-off, which takes longer than all others.
    ask(cluster.proxy.url, "Hello!", max_tokens=1)
    prompt = prompt_of(1)
    console.print(f"\nA prompt of {len(prompt):,} characters goes to the proxy. The answer:\n")
    before_s = prompt_seconds(cluster.proxy)
    said = ask(cluster.proxy.url, prompt, console)
    prefill_s = prompt_seconds(cluster.proxy) - before_s
    with console.status("the same from the decode worker alone"):
        alone = ask(cluster.decode.url, prompt, cache_salt="alone")
    console.print()
    tokens = said.usage["prompt_tokens"]
    _line(console, "prompt computed", f"{_ms(prefill_s)} for {tokens:,} tokens, by the prefill worker")
    if said.moved is None:
        console.print("No KV moved; the decode worker computed the prompt.", style="yellow")
    else:
        size, read_s = said.moved["bytes"], said.moved["read_s"]
        _line(console, "KV moved", f"{said.moved['tokens']:,} tokens, {size / 1e6:,.1f} MB")
        _line(console, "  waiting", _ms(said.moved["queued_s"]))
        _line(console, "  reading", f"{_ms(read_s)}, {size / read_s / 1e9:.1f} GB/s")
        _line(console, "  confirming", _ms(said.moved["confirmed_s"]))
    _line(console, "first word", f"{_ms(said.first_s)} after the request")
    _line(console, "one worker alone", f"{_ms(alone.first_s)} to the first word")
    return _compared(console, said, alone) and said.moved is not None


def _without_prefill(console: Console, cluster: Cluster) -> bool:
    console.print("\nNow the prefill worker is killed, and another prompt goes to the proxy. The answer:\n")
    kill(cluster.prefill)
    prompt = prompt_of(2)
    said = ask(cluster.proxy.url, prompt, console)
    with console.status("the same from the decode worker alone"):
        alone = ask(cluster.decode.url, prompt, cache_salt="alone")
    console.print()
    computed = said.usage["prompt_tokens"] - said.usage["prompt_tokens_details"]["cached_tokens"]
    _line(console, "prompt computed", f"{computed:,} tokens, by the decode worker")
    _line(console, "first word", f"{_ms(said.first_s)} after the request")
    return _compared(console, said, alone)


def _compared(console: Console, said: Said, alone: Said) -> bool:
    if said.text == alone.text:
        _line(console, "text", "equal to that of one worker alone", style="green")
        return True
    _line(console, "text", "DIFFERENT from that of one worker alone, which is:", style="bold red")
    console.print(alone.text, markup=False)
    return False


def _line(console: Console, name: str, value: str, *, style: str = "") -> None:
    from rich.table import Table
    from rich.text import Text

    # A cell that does not fit is continued under itself.
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=16, no_wrap=True)
    table.add_column()
    table.add_row(Text(name), Text(value, style=style))
    console.print(table)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 0.01 else f"{seconds * 1000:,.0f} ms"


if __name__ == "__main__":
    main()
