"""Options of every command that runs a model. Names and meanings are those of `EngineConfig`, which checks them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from outrider.config import DTYPES, OPS, SANITIZER_LEVELS, SANITIZER_MODES, EngineConfig
from outrider.errors import ConfigError
from outrider.models.resolve import DEFAULT_MODEL, is_installed, packaged_drafter

MODEL = "Model"
ENGINE = "Engine"
CHECKING = "Checking"

PACKAGED_METHODS = ("dflash", "eagle3")
SPECULATIVE_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
_UNITS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_DEFAULTS = EngineConfig()


def byte_count(text: str | int) -> int:
    """2147483648, 2G or 500m: small letters count in thousands, capitals in 1,024s."""
    digits, unit = str(text), 1
    if digits and digits[-1] in _UNITS:
        digits, unit = digits[:-1], _UNITS[digits[-1]]
    try:
        return int(float(digits) * unit)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is no number of bytes; write 2147483648 or 2G") from None


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A built-in name, a directory, a .gguf file or a hub id.", rich_help_panel=MODEL
        ),
    ] = DEFAULT_MODEL
    dtype: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(DTYPES)}. auto: float32 on a CPU.",
            rich_help_panel=MODEL,
        ),
    ] = _DEFAULTS.dtype
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=MODEL)] = _DEFAULTS.device
    expand_weights: Annotated[
        bool,
        typer.Option(
            "--expand-weights",
            help="Write quantised and 16-bit weights out in memory and compute in float32 throughout: nearly the same "
            "results, several times the memory, slower.",
            rich_help_panel=MODEL,
        ),
    ] = _DEFAULTS.expand_weights
    num_threads: Annotated[
        int | None,
        typer.Option(help="Threads of CPU kernels. Default: one per core.", show_default=False, rich_help_panel=MODEL),
    ] = None
    ops: Annotated[str, typer.Option(help=f"Which kernels: {', '.join(OPS)}.", rich_help_panel=MODEL)] = _DEFAULTS.ops

    def settings(self) -> dict[str, Any]:
        """As EngineConfig takes them."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt and output together. Default: what the model and the memory allow.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None
    max_num_seqs: Annotated[int, typer.Option(help="Most requests that run at once.", rich_help_panel=ENGINE)] = (
        _DEFAULTS.max_num_seqs
    )
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most rows in one step; longer prompts come in chunks.", rich_help_panel=ENGINE)
    ] = _DEFAULTS.max_num_batched_tokens
    block_size: Annotated[int, typer.Option(help="Tokens in a page of the KV cache.", rich_help_panel=ENGINE)] = (
        _DEFAULTS.block_size
    )
    no_enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--no-enable-prefix-caching",
            help="Compute every prompt anew, even if prompts begin alike.",
            rich_help_panel=ENGINE,
        ),
    ] = False
    kv_retention: Annotated[
        str,
        typer.Option(
            help="What the cache keeps of layers with a window: dense, tail (ends and shared prefixes), or a number: "
            "every so many tokens.",
            metavar="POLICY",
            rich_help_panel=ENGINE,
        ),
    ] = str(_DEFAULTS.kv_retention)
    # The default, so that nobody needs it; scripts for other engines have it. As a pair the two would not fit
    # into the width of a help page.
    enable_prefix_caching: Annotated[bool, typer.Option("--enable-prefix-caching", hidden=True)] = False
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            help="Memory for KV, such as 2G. Default: 2 GiB at most on a CPU, what is free on a GPU.",
            parser=byte_count,
            metavar="BYTES",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory to use.", rich_help_panel=ENGINE)
    ] = _DEFAULTS.gpu_memory_utilization
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help=f"How to draft, as JSON: '{SPECULATIVE_EXAMPLE}'.",
            metavar="JSON",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None
    sanitizer: Annotated[
        str,
        typer.Option(
            help=f"Check every read and write of KV: {', '.join(SANITIZER_MODES)}.",
            rich_help_panel=CHECKING,
        ),
    ] = _DEFAULTS.sanitizer
    sanitizer_level: Annotated[
        str,
        typer.Option(
            help=f"{' or '.join(SANITIZER_LEVELS)}; bytes also verifies checksums of shared pages.",
            rich_help_panel=CHECKING,
        ),
    ] = _DEFAULTS.sanitizer_level

    def settings(self) -> dict[str, Any]:
        """As EngineConfig takes them, but for speculative_config, which is still the mapping that LLM takes."""
        settings = asdict(self) | {"speculative_config": speculative_mapping(self.speculative_config)}
        if settings.pop("no_enable_prefix_caching") and self.enable_prefix_caching:
            raise ConfigError("--enable-prefix-caching and --no-enable-prefix-caching contradict each other; give one")
        return settings | {"enable_prefix_caching": not self.no_enable_prefix_caching}


def packaged_speculations(model: str) -> list[str]:
    """For the drafters that are installed for a model, the best first; as JSON, as a person would write it."""
    return [json.dumps({"method": method}) for method in installed_drafters(model)]


def installed_drafters(model: str) -> list[str]:
    """Methods of the drafters that are installed for a model, the best first."""
    names = {method: packaged_drafter(model.lower(), method) for method in PACKAGED_METHODS}
    return [method for method, name in names.items() if name is not None and is_installed(name)]


def speculative_mapping(text: str | None) -> dict[str, Any] | None:
    """What --speculative-config says."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"--speculative-config is no valid JSON ({problem}); write '{SPECULATIVE_EXAMPLE}'") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--speculative-config must be a JSON object such as '{SPECULATIVE_EXAMPLE}', got {text}")
    return value


def chosen_model(positional: str | None, options: ModelOptions) -> str:
    """A model may be given as MODEL or as --model, but not as two different ones."""
    if positional is None:
        return options.model
    if options.model not in (DEFAULT_MODEL, positional):
        raise ConfigError(f"two models are given, {positional!r} and --model {options.model!r}; give one")
    return positional
