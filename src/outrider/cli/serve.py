"""`outrider serve`: OpenAI's HTTP API over a model, with speculation on."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from rich.text import Text

from outrider.cli.drafter_options import DRAFTS_COME_FROM, NoSpeculation, with_default_speculation
from outrider.cli.engine_options import EngineOptions, ModelOptions, PositionalModel, chosen_model, engine_config
from outrider.cli.event_options import EventOptions
from outrider.cli.grouped import grouped
from outrider.cli.serve_options import AccessOptions, LimitOptions, server_config
from outrider.cli.terminal import errors, loading
from outrider.cli.transfer_options import TransferOptions
from outrider.tools.wording import counted

if TYPE_CHECKING:
    from outrider.server.config import ServerConfig
    from outrider.server.messages import Facts

SERVE_HELP = (
    "Serve a model over HTTP, with OpenAI's API.\n\n"
    f"{DRAFTS_COME_FROM} SIGTERM and Ctrl-C let running requests finish before the server ends; a second signal "
    "ends it at once.\n\n"
    "[dim]Examples:[/dim]\n\n"
    "  outrider serve\n\n"
    "  outrider serve ./model --port 9000 --api-key @keys.txt\n\n"
    '  outrider serve --speculative-config \'{"method": "eagle3"}\''
)


@grouped
def serve(
    *,
    positional: PositionalModel = None,
    model: ModelOptions,
    access: AccessOptions,
    no_speculation: NoSpeculation = False,
    engine: EngineOptions,
    transfer: TransferOptions,
    events: EventOptions,
    limits: LimitOptions,
) -> None:
    name = chosen_model(positional, model)
    engine = with_default_speculation(engine, name, no_speculation=no_speculation)
    config = server_config(access, limits)
    published = events.config(served_model=next(iter(config.served_model_names), None))
    built = engine_config(name, model, engine, transfer=transfer.config(), store=transfer.store(), events=published)

    from outrider.server.run import Announcements, serve

    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    with ExitStack() as until_ready:
        progress = until_ready.enter_context(loading())

        def ready(url: str, facts: Facts) -> None:
            until_ready.close()
            # The server works all the same where stderr is on a full disk or a closed pipe.
            with suppress(OSError, SystemExit):
                _announce(url, facts, config)

        serve(
            config, built, Announcements(loading=lambda told: progress(told.what, told.done, told.total), ready=ready)
        )


def _announce(url: str, facts: Facts, config: ServerConfig) -> None:
    drafting = (
        "no speculation"
        if facts.drafter is None
        else f"{facts.drafter} drafts up to {counted(facts.drafts_max, 'token')}"
    )
    names = ", ".join(config.served_model_names or (facts.model_name,))
    keys = counted(len(config.api_keys), "API key") if config.api_keys else "no API key needed"
    peers = "" if facts.transfer is None else f" · {facts.transfer.role}, KV at {facts.transfer.endpoint}"
    errors.print(
        Text(f"serving {names}", style="bold")
        + Text(
            f" at {url}/v1 · playground at {url}/ · {drafting} · {facts.max_model_len:,} tokens · "
            f"{facts.device}, {facts.dtype} · {keys}{peers}"
        ),
        soft_wrap=True,
    )
    if not config.api_keys and not config.is_loopback:
        errors.print(
            Text("warning: any client that can reach this machine is served; give --api-key", style="yellow"),
            soft_wrap=True,
        )
