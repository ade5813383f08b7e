"""`outrider doctor --peer`: is a prefill worker of any use to the engine that would run here?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from outrider.cli.findings import print_findings
from outrider.cli.serve_options import API_KEY_VARIABLE, given_keys
from outrider.cli.terminal import errors, loading, out
from outrider.cli.transfer_options import TransferOptions
from outrider.config import EngineConfig
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.tools.doctor.peer import PeerReport

DEFAULT_TRANSFER = '{"kv_role": "kv_consumer"}'


def show_peers(
    config: EngineConfig,
    peers: Sequence[str],
    transfer: TransferOptions,
    api_keys: Sequence[str] | None,
    *,
    as_json: bool,
) -> None:
    """Prints what each worker is good for. Exits with status 1 unless all of them are of use."""
    settings = replace(transfer, kv_transfer_config=transfer.kv_transfer_config or DEFAULT_TRANSFER).config()
    assert settings is not None
    if not settings.fetches:
        raise ConfigError(
            "--peer asks whose KV this engine could start from, and kv_role kv_producer starts from none; write "
            "kv_consumer or kv_both"
        )
    keys = given_keys(api_keys, API_KEY_VARIABLE)
    if len(keys) > 1:
        raise ConfigError("--api-key: one key is sent to all workers; give one")

    from outrider.engine.build import build_engine
    from outrider.tools.doctor.peer import OwnSide, examine_peer

    with loading() as progress:
        own = OwnSide.of(build_engine(config, progress=progress), settings)
    reports: list[PeerReport] = []
    for address in peers:
        with errors.status(f"asking {address}", spinner="dots"):
            reports.append(examine_peer(address, own, api_key=keys[0] if keys else None))
        if not as_json:
            _print(reports[-1])
    healthy = all(report.healthy for report in reports)
    if as_json:
        typer.echo(json.dumps({"healthy": healthy, "peers": [report.as_json() for report in reports]}))
    if not healthy:
        raise typer.Exit(1)


def _print(report: PeerReport) -> None:
    print_findings(f"peer {report.address}", report.findings)
    style = "bold red" if not report.healthy else "yellow" if report.usable == "target" else "green"
    out.print(Text(f"{report.address} is {report.verdict}", style=style), soft_wrap=True)
    out.print()
