"""`outrider doctor --store`: can this machine use a Mooncake Store, and how fast is it?"""

from __future__ import annotations

import json

import typer

from outrider.cli.findings import print_findings
from outrider.cli.terminal import errors
from outrider.cli.transfer_options import STORE_EXAMPLE, TransferOptions
from outrider.errors import ConfigError


def show_store(transfer: TransferOptions, *, as_json: bool) -> None:
    """Prints what was found. Exits with status 1 if the store cannot be used."""
    config = transfer.store()
    if config is None:
        raise ConfigError(f"--store asks a Mooncake Store; say which: --kv-store-config '{STORE_EXAMPLE}'")

    from outrider.tools.doctor.findings import Status
    from outrider.tools.doctor.store import examine_store

    with errors.status(f"asking {config.master_server_address}", spinner="dots"):
        findings = examine_store(config)
    healthy = all(finding.status is not Status.PROBLEM for finding in findings)
    if as_json:
        typer.echo(json.dumps({"healthy": healthy, "store": [finding.as_json() for finding in findings]}))
    else:
        print_findings(f"store {config.master_server_address}", findings)
    if not healthy:
        raise typer.Exit(1)
