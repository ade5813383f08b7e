"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and optional windows on the upper layers."""

from __future__ import annotations

from collections.abc import Callable

from outrider.models.recipes.base import Recipe, common_fields, make_layers, optional_window, windows_by_layer_type
from outrider.models.recipes.config import ConfigReader
from outrider.models.spec import DecoderSpec


def qwen_windows(config: ConfigReader) -> Callable[[int], int | None]:
    """Returns the windows, which apply only with use_sliding_window and from layer max_window_layers on."""
    window = optional_window(config) if config.flag("use_sliding_window", False) else None
    first = config.integer("max_window_layers", 28)
    return windows_by_layer_type(config, window, default=lambda number: number >= first)


def _qwen2(config: ConfigReader) -> DecoderSpec:
    fields = common_fields(config, kv_heads=32)
    layers = make_layers(config, head_dim=fields["head_dim"], window=qwen_windows(config))
    return DecoderSpec(family="qwen2", layers=layers, qkv_bias=True, **fields)


QWEN2 = Recipe(family="qwen2", architectures=("Qwen2ForCausalLM",), model_types=("qwen2",), gguf="qwen2", read=_qwen2)
