"""The drafter of a command: the one that its options name, or else the default, the same in every command."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from outrider.cli.engine_options import SPECULATIVE_EXAMPLE, EngineOptions, engine_option, packaged_speculations
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.speculative.registry import BUILT_IN, drafting_method, method_names

METHODS = ", ".join(BUILT_IN)
"""Built-in methods, for help texts: what other packages register is looked up only when it is needed."""
NGRAM_LOOK_UP = SPECULATIVE_EXAMPLE
"""Drafting that needs no second model, and costs nothing where it finds nothing to propose."""
DRAFTS_COME_FROM = (
    "Drafts come from the drafter that is installed for the model, or else from n-gram look-up in the text itself, "
    "unless --speculative-config names another. A drafter that is named without a number of drafts drafts as many "
    "tokens as pay, chosen at each step. The text is the same with any drafter and with --no-speculation."
)

NoSpeculation = Annotated[bool, engine_option("--no-speculation", help="Decode one token per step, without drafts.")]


def speculation_of(
    given: dict[str, Any] | None, *, method: str | None, drafter: str | None, k: int | None
) -> SpeculativeConfig:
    """Returns the drafter that --method, --drafter, --k and --speculative-config name together."""
    fields = dict(given or {})
    for option, name, value in (
        ("--method", "method", method),
        ("--drafter", "model", drafter),
        ("--k", "num_speculative_tokens", k),
    ):
        if value is None:
            continue
        if fields.get(name, value) != value:
            raise ConfigError(
                f"{option} says {value!r}, but --speculative-config says {name} {fields[name]!r}; give one of them"
            )
        fields[name] = value
    if "method" not in fields:
        raise ConfigError(f"no drafting method is given; choose one with --method: {', '.join(method_names())}")
    if fields.get("lookup"):
        raise ConfigError(
            "lookup goes with an engine that chooses how much to draft, and not with this; leave lookup out"
        )
    # These commands measure what the drafter can do, not what is fastest on this machine: an engine that chooses would
    # draft by how long its steps take.
    if fields.get("num_speculative_tokens") is None:
        fields["num_speculative_tokens"] = drafting_method(fields["method"]).trained_k
    fields.setdefault("draft_vocab_size", 0)
    return SpeculativeConfig(**fields)


def with_default_speculation(engine: EngineOptions, model: str, *, no_speculation: bool = False) -> EngineOptions:
    """Returns the options with the default drafter where none is named."""
    if no_speculation:
        if engine.speculative_config is not None:
            raise ConfigError("--no-speculation contradicts --speculative-config; give one of them")
        return engine
    if engine.speculative_config is not None:
        return engine
    return replace(engine, speculative_config=[*packaged_speculations(model), NGRAM_LOOK_UP][0])
