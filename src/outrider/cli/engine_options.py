"""Options of every command that runs a model. Names and meanings are those of `EngineConfig`, which checks them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from outrider.cli.grouped import panel
from outrider.config import (
    BACKENDS,
    DTYPES,
    SANITIZER_LEVELS,
    SANITIZER_MODES,
    EngineConfig,
    KVStoreConfig,
    KVTransferConfig,
    SpeculativeConfig,
)
from outrider.errors import ConfigError
from outrider.events.config import KVEventsConfig
from outrider.models.resolve import DEFAULT_MODEL, is_installed, packaged_drafter
from outrider.speculative.registry import BUILT_IN

model_option = panel("Model")
engine_option = panel("Engine")
checking_option = panel("Checking")

SPECULATIVE_EXAMPLE = '{"method": "ngram"}'
WITHOUT_A_NUMBER = (
    "With neither num_speculative_tokens nor draft_confidence the engine chooses at each step how much to draft."
)
_UNITS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_DEFAULTS = EngineConfig()


PositionalModel = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")]
SpeculativeConfigs = Annotated[
    list[str] | None,
    engine_option(
        "--speculative-config",
        help=f"How to draft, as JSON; may be repeated. Default: '{SPECULATIVE_EXAMPLE}', and every drafter that is "
        "installed for the model.",
        metavar="JSON",
    ),
]


def byte_count(text: str | int) -> int:
    """Returns the number that 2147483648, 2G or 500m stands for: k, m, g are powers of 1,000; K, M, G of 1,024."""
    digits, unit = str(text), 1
    if digits and digits[-1] in _UNITS:
        digits, unit = digits[:-1], _UNITS[digits[-1]]
    try:
        return int(float(digits) * unit)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a number of bytes; write 2147483648 or 2G") from None


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model: Annotated[
        str, model_option("--model", "-m", help="A built-in name, a directory, a .gguf file or a hub id.")
    ] = DEFAULT_MODEL
    dtype: Annotated[
        str, model_option(help=f"{', '.join(DTYPES)}. auto is float32 on a CPU, the checkpoint's own type on a GPU.")
    ] = _DEFAULTS.dtype
    device: Annotated[str, model_option(help="auto, cpu, cuda or cuda:N.")] = _DEFAULTS.device
    expand_weights: Annotated[
        bool,
        model_option(
            "--expand-weights",
            help="Convert quantised and 16-bit weights to float32 when they are loaded: nearly the same results, "
            "several "
            "times the memory, slower.",
        ),
    ] = _DEFAULTS.expand_weights
    num_threads: Annotated[int | None, model_option(help="Threads for CPU kernels. Default: one per core.")] = None
    backend: Annotated[str, model_option(help=f"Implementation of the layers: {', '.join(BACKENDS)}.")] = (
        _DEFAULTS.backend
    )

    def settings(self) -> dict[str, Any]:
        """Returns the options as keyword arguments of EngineConfig."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    max_model_len: Annotated[
        int | None,
        engine_option(help="Longest prompt plus output, in tokens. Default: what the model and the memory allow."),
    ] = None
    max_num_seqs: Annotated[int, engine_option(help="Most requests in one batch.")] = _DEFAULTS.max_num_seqs
    max_num_batched_tokens: Annotated[
        int, engine_option(help="Most tokens computed in one step; longer prompts are prefilled in chunks.")
    ] = _DEFAULTS.max_num_batched_tokens
    block_size: Annotated[int, engine_option(help="Tokens in a page (vLLM: block) of the KV cache.")] = (
        _DEFAULTS.block_size
    )
    no_enable_prefix_caching: Annotated[
        bool,
        engine_option(
            "--no-enable-prefix-caching",
            help="Compute every prompt from its first token, even if prompts share a prefix.",
        ),
    ] = False
    kv_retention: Annotated[
        str,
        engine_option(
            help="Where a cached text of a model with sliding-window layers can be hit: dense (everywhere), tail (at "
            "its end and at shared prefixes), or every N tokens.",
            metavar="POLICY",
        ),
    ] = str(_DEFAULTS.kv_retention)
    # The default; accepted because scripts for other engines pass it. Shown as a pair, the two options would not fit
    # into the width of a help page.
    enable_prefix_caching: Annotated[bool, typer.Option("--enable-prefix-caching", hidden=True)] = False
    kv_cache_memory_bytes: Annotated[
        int | None,
        engine_option(
            help="Memory for the KV cache, such as 2G. Default: at most 2 GiB on a CPU, what is free on a GPU.",
            parser=byte_count,
            metavar="BYTES",
        ),
    ] = None
    kv_offloading_size: Annotated[
        float | None,
        engine_option(
            help="Memory of the host behind the KV cache, in GiB: what is evicted from the cache can be copied back.",
            metavar="GIB",
        ),
    ] = None
    kv_offloading_retention: Annotated[
        str, engine_option(help="What that memory keeps, in the words of --kv-retention.", metavar="POLICY")
    ] = str(_DEFAULTS.kv_offloading_retention)
    gpu_memory_utilization: Annotated[float, engine_option(help="Fraction of a GPU's memory to use.")] = (
        _DEFAULTS.gpu_memory_utilization
    )
    speculative_config: Annotated[
        str | None,
        engine_option(
            help=f"How to draft, as JSON: '{SPECULATIVE_EXAMPLE}'. {WITHOUT_A_NUMBER}",
            metavar="JSON",
        ),
    ] = None
    sanitizer: Annotated[
        str, checking_option(help=f"What to do when a read or write of KV is wrong: {', '.join(SANITIZER_MODES)}.")
    ] = _DEFAULTS.sanitizer
    sanitizer_level: Annotated[
        str, checking_option(help=f"{' or '.join(SANITIZER_LEVELS)}; bytes also verifies checksums of shared pages.")
    ] = _DEFAULTS.sanitizer_level

    def settings(self) -> dict[str, Any]:
        """Returns the options as keyword arguments of LLM: EngineConfig's, but with speculative_config as a mapping."""
        settings = asdict(self) | {"speculative_config": speculative_mapping(self.speculative_config)}
        if settings.pop("no_enable_prefix_caching") and self.enable_prefix_caching:
            raise ConfigError("--enable-prefix-caching and --no-enable-prefix-caching contradict each other; give one")
        return settings | {"enable_prefix_caching": not self.no_enable_prefix_caching}


def packaged_speculations(model: str) -> list[str]:
    """Returns a --speculative-config for each drafter that is installed for a model, the best first."""
    return [json.dumps({"method": method}) for method in installed_drafters(model)]


def installed_drafters(model: str) -> list[str]:
    """Returns the methods of the drafters that are installed for a model, the best first."""
    names = {method: packaged_drafter(model.lower(), method) for method in BUILT_IN}
    return [method for method, name in names.items() if name is not None and is_installed(name)]


def speculative_mapping(text: str | None) -> dict[str, Any] | None:
    """Returns the value of --speculative-config as a mapping."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(
            f"--speculative-config is not valid JSON ({problem}); write '{SPECULATIVE_EXAMPLE}'"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"--speculative-config must be a JSON object such as '{SPECULATIVE_EXAMPLE}', got {text}")
    return value


def engine_config(
    name: str,
    model: ModelOptions,
    engine: EngineOptions,
    *,
    transfer: KVTransferConfig | None = None,
    store: KVStoreConfig | None = None,
    events: KVEventsConfig | None = None,
) -> EngineConfig:
    settings = model.settings() | engine.settings()
    settings |= {"model": name, "kv_transfer_config": transfer, "kv_store_config": store, "kv_events_config": events}
    return EngineConfig(**settings | {"speculative_config": SpeculativeConfig.of(settings["speculative_config"])})


def chosen_model(positional: str | None, options: ModelOptions) -> str:
    """Returns the model that was given as MODEL or as --model; refuses two different ones."""
    if positional is None:
        return options.model
    if options.model not in (DEFAULT_MODEL, positional):
        raise ConfigError(f"two models are given, {positional!r} and --model {options.model!r}; give one")
    return positional
