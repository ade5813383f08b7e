"""The recipe of a model family, and what most families have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ConfigError, ModelError
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.layout import Layout, decoder_layout
from outrider.models.recipes.rope import FULL, SLIDING, rope_of
from outrider.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, RopeSpec

# Far above any real model, so that a damaged file cannot occupy the loader.
LAYERS_MAX = 10_000
EXPERTS_MAX = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    family: str
    architectures: tuple[str, ...]
    """Values of `architectures` in a Hugging Face configuration."""
    model_types: tuple[str, ...]
    """Values of `model_type`, for files without `architectures`."""
    gguf: str | None = None
    """Value of `general.architecture` in a GGUF file."""
    gguf_interleaved_heads: bool = False
    """Whether GGUF stores query and key rows interleaved, for rotation of neighbours instead of halves."""
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    """GGUF names of a layer's tensors that differ from those of Llama."""
    gguf_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    """Fields that a GGUF file omits, derived from the rest of its configuration."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Prefixes of stored tensor names and their replacements."""
    other_parts: tuple[str, ...] = ()
    """Prefixes of tensors outside the decoder, such as those of a vision tower."""
    mxfp4: bool = False
    """Whether checkpoints quantised to MXFP4 can be read."""
    read: Callable[[ConfigReader], DecoderSpec]
    layout: Callable[[DecoderSpec], Layout] = decoder_layout

    def spec(self, config: Mapping[str, Any], source: str) -> DecoderSpec:
        """Returns the spec that a configuration describes; `source` is its file, for messages."""
        try:
            return self.read(ConfigReader(config, source))
        except ConfigError as problem:
            raise ModelError(f"{source}: {problem}") from None


def common_fields(config: ConfigReader, *, kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, Any]:
    """Returns the DecoderSpec fields that all families spell alike; the arguments are a family's defaults."""
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if heads < 1:
        raise config.wrong("num_attention_heads", "at least 1")
    if not config.has("head_dim") and head_dim is None and hidden % heads:
        raise ModelError(f"{config.source}: {hidden} hidden elements cannot be split into {heads} heads; set head_dim")
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": config.integer("num_key_value_heads", kv_heads or heads),
        "head_dim": config.integer("head_dim", head_dim or hidden // heads),
        "max_position": config.integer("max_position_embeddings"),
        "norm_eps": config.positive("rms_norm_eps", 1e-6),
        "activation": config.activation(),
        "tied_head": config.flag("tie_word_embeddings", False),
    }


def make_layers(
    config: ConfigReader,
    *,
    head_dim: int,
    window: Callable[[int], int | None] = lambda _: None,
    experts: Callable[[int], ExpertsSpec | None] = lambda _: None,
    theta: float = 10_000.0,
    rope: Callable[[str], RopeSpec] | None = None,
) -> tuple[LayerSpec, ...]:
    """Returns all layers; `window` and `experts` are asked by layer number, `rope` by kind of layer."""
    count = config.integer("num_hidden_layers")
    if not 1 <= count <= LAYERS_MAX:
        raise config.wrong("num_hidden_layers", f"between 1 and {LAYERS_MAX}")
    layers = []
    for number in range(count):
        size = window(number)
        kind = FULL if size is None else SLIDING
        rotary = rope(kind) if rope is not None else rope_of(config, layer_kind=kind, head_dim=head_dim, theta=theta)
        layers.append(LayerSpec(window=size, rope=rotary, experts=experts(number)))
    return tuple(layers)


def windows_by_layer_type(
    config: ConfigReader, window: int | None, default: Callable[[int], bool]
) -> Callable[[int], int | None]:
    """Returns the window of each layer by `layer_types`; if that is missing, `default` says which layers slide."""
    types = config.text_list("layer_types")
    count = config.integer("num_hidden_layers")
    if types is None:
        return lambda number: window if window is not None and default(number) else None
    if len(types) != count:
        raise ModelError(f"{config.source}: {len(types)} layer_types for {count} layers")
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise ModelError(
            f"{config.source}: layers of type {', '.join(unknown)} are not supported; supported: {FULL}, {SLIDING}"
        )
    if SLIDING in types and window is None:
        raise ModelError(f"{config.source}: layer_types has {SLIDING}, but no sliding_window is in use")
    return lambda number: window if types[number] == SLIDING else None


def optional_window(config: ConfigReader, default: int = 4096) -> int | None:
    """Returns the window; null means none, and a missing field means Hugging Face's default."""
    if "sliding_window" in config.fields and not config.has("sliding_window"):
        return None
    return window_of(config, default)


def window_of(config: ConfigReader, default: int | None = None) -> int:
    window = config.integer("sliding_window", default)
    if window < 1:
        raise config.wrong("sliding_window", "at least 1, or null if layers read everything")
    return window


def periodic_windows(config: ConfigReader, *, window: int | None, period: int) -> Callable[[int], int | None]:
    """Returns the windows by `layer_types`; if that is missing, the last layer of each period reads everything."""
    types = config.text_list("layer_types")
    if types is None and window is None and period > 1:
        raise config.wrong("sliding_window", "a whole number: most layers of this model have a window")
    return windows_by_layer_type(config, window, default=lambda number: (number + 1) % period != 0)
