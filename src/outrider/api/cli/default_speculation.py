"""Who drafts where nobody says so: the same drafter in every command that runs a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from outrider.api.cli.engine_options import ENGINE, SPECULATIVE_EXAMPLE, EngineOptions, packaged_speculations
from outrider.errors import ConfigError

LOOK_UP = SPECULATIVE_EXAMPLE
"""Needs no second model, and costs nothing where it finds nothing to propose."""
DRAFTS_COME_FROM = (
    "Drafts come from the drafter that is made for the model, or else from the text itself (n-gram look-up), unless "
    "--speculative-config names another; the text is the same with any of them and with --no-speculation."
)

NoSpeculation = Annotated[
    bool, typer.Option("--no-speculation", help="Decode plainly, without drafts.", rich_help_panel=ENGINE)
]


def with_default_speculation(engine: EngineOptions, model: str, *, no_speculation: bool = False) -> EngineOptions:
    """The options with the drafter that is used where none is named."""
    if no_speculation:
        if engine.speculative_config is not None:
            raise ConfigError("--no-speculation contradicts --speculative-config; give one of them")
        return engine
    if engine.speculative_config is not None:
        return engine
    return replace(engine, speculative_config=[*packaged_speculations(model), LOOK_UP][0])
