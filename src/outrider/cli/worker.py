"""`outrider worker`: an engine behind the front end of NVIDIA Dynamo."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.drafter_options import DRAFTS_COME_FROM, NoSpeculation, with_default_speculation
from outrider.cli.engine_options import EngineOptions, ModelOptions, PositionalModel, chosen_model, engine_config
from outrider.cli.event_options import EventOptions
from outrider.cli.grouped import grouped, panel
from outrider.cli.transfer_options import TransferOptions
from outrider.errors import ConfigError

WORKER_HELP = (
    "Run an engine as a worker of an NVIDIA Dynamo cluster.\n\n"
    f"{DRAFTS_COME_FROM} Workers and front end find each other as Dynamo's environment variables say "
    "(DYN_DISCOVERY_BACKEND and so on); --discovery names a directory for a cluster on one machine instead. SIGTERM "
    "lets running requests finish. outrider cluster starts a whole cluster on one machine.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider worker --discovery /run/user/1000/fleet\n\n"
    "  outrider worker --role prefill --cluster-key @cluster.key"
)
ROLES = ("agg", "prefill", "decode", "stand-in")
cluster_option = panel("Cluster")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    role: Annotated[
        str,
        cluster_option(
            help="agg computes prompts and answers; prefill computes prompts for decode workers; decode writes answers "
            "from their KV, or from prompts that it computes itself; stand-in has no engine, and lets decode workers "
            "compute prompts while no prefill worker is there."
        ),
    ] = "agg"
    discovery: Annotated[
        Path | None,
        cluster_option(help="Directory by which front end and workers on one machine find each other.", metavar="DIR"),
    ] = None
    namespace: Annotated[str, cluster_option(help="Name of the cluster.")] = "outrider"
    name: Annotated[
        str | None, cluster_option(help="Name of this worker in logs and metrics. [dim]\\[default: role and pid][/dim]")
    ] = None
    served_model_name: Annotated[
        str | None, cluster_option(help="Name by which clients ask for the model.", metavar="NAME")
    ] = None
    system_port: Annotated[
        int | None, cluster_option(help="Port of /health and /metrics of this worker.", metavar="PORT")
    ] = None
    drain_limit: Annotated[
        float, cluster_option(help="Seconds in which running requests may finish after SIGTERM.", metavar="SECONDS")
    ] = 30.0
    shared_directory: Annotated[
        Path | None,
        cluster_option(
            help="Directory on a file system that all workers share. Requests with penalties or min_tokens need it, so "
            "that a text which a dead worker began is refused instead of continued inexactly. "
            "[dim]\\[default: --discovery][/dim]",
            metavar="DIR",
        ),
    ] = None
    request_log: Annotated[
        Path | None,
        cluster_option(
            help="File to which a line of JSON is appended for each request as it begins and as it ends.",
            metavar="FILE",
        ),
    ] = None
    state_file: Annotated[Path | None, typer.Option("--state-file", hidden=True)] = None
    tool_call_parser: Annotated[
        str | None, cluster_option(help="Dynamo's parser of tool calls, such as hermes.", metavar="NAME")
    ] = None
    reasoning_parser: Annotated[str | None, cluster_option(help="Dynamo's parser of reasoning.", metavar="NAME")] = None


@grouped
def worker(
    *,
    positional: PositionalModel = None,
    model: ModelOptions,
    cluster: ClusterOptions,
    no_speculation: NoSpeculation = False,
    engine: EngineOptions,
    transfer: TransferOptions,
    events: EventOptions,
) -> None:
    require_dynamo()
    if cluster.role not in ROLES:
        raise ConfigError(f"--role must be one of {', '.join(ROLES)}; got {cluster.role!r}")
    from outrider.cluster.environment import one_machine
    from outrider.cluster.model_files import write_model_files
    from outrider.cluster.settings import Role, WorkerSettings

    name = chosen_model(positional, model)
    if cluster.discovery is not None:
        cluster.discovery.mkdir(parents=True, exist_ok=True)
        os.environ.update(one_machine(cluster.discovery))
    if cluster.system_port is not None:
        if not 0 < cluster.system_port < 1 << 15:
            raise ConfigError(
                f"--system-port must be below 32768, since Dynamo's settings hold no more; got {cluster.system_port}"
            )
        os.environ["DYN_SYSTEM_PORT"] = str(cluster.system_port)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    facts = write_model_files(name, _cache_directory(), context_tokens=engine.max_model_len)
    served = cluster.served_model_name or facts.name
    if cluster.role == "stand-in":
        from outrider.cluster.stand_in import stand_in

        stand_in(
            files=str(facts.directory),
            served_model=served,
            namespace=cluster.namespace,
            context_tokens=facts.context_tokens,
            block_tokens=engine.block_size,
        )
        return
    role = Role(cluster.role)
    engine = with_default_speculation(engine, name, no_speculation=no_speculation)
    transfer = _with_role(transfer, role.kv_role)
    settings = WorkerSettings(
        engine=engine_config(
            name, model, engine, transfer=transfer.config(), events=events.config(served_model=served)
        ),
        role=role,
        name=cluster.name or f"{role.value}-{os.getpid()}",
        served_model=served,
        namespace=cluster.namespace,
        files=facts.directory,
        context_tokens=facts.context_tokens,
        drain_s=cluster.drain_limit,
        marks=_marks(cluster),
        request_log=cluster.request_log,
        state_file=cluster.state_file,
        tool_call_parser=cluster.tool_call_parser,
        reasoning_parser=cluster.reasoning_parser,
    )
    from outrider.cluster.worker import serve

    serve(settings)


def _marks(cluster: ClusterOptions) -> Path | None:
    shared = cluster.shared_directory or cluster.discovery
    return None if shared is None else shared / "outrider-requests"


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outrider" / "cluster"


def require_dynamo() -> None:
    """Raise an error that says how to install Dynamo, if it is not there."""
    if any(find_spec(name) is None for name in ("dynamo", "uvloop", "yaml")):
        raise ConfigError(
            "this command needs NVIDIA Dynamo: pip install 'outrider[cluster]', then pip install --no-deps "
            "ai-dynamo==1.6.1"
        )


def _with_role(transfer: TransferOptions, kv_role: str | None) -> TransferOptions:
    """Returns the options of KV transfer that go with a worker's role."""
    if kv_role is None:
        if transfer.kv_transfer_config is not None:
            raise ConfigError("--kv-transfer-config is for --role prefill and decode; leave it out, or give a role")
        return transfer
    if transfer.kv_transfer_config is None:
        return replace(transfer, kv_transfer_config=f'{{"kv_role": "{kv_role}"}}')
    return transfer
