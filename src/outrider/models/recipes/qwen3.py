"""Qwen3: Qwen2 with norms over the heads of queries and keys in place of their biases."""

from __future__ import annotations

from outrider.models.recipes.base import Recipe, common_fields, make_layers
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.qwen2 import qwen_windows
from outrider.models.spec import DecoderSpec


def _qwen3(config: ConfigReader) -> DecoderSpec:
    fields = common_fields(config, kv_heads=32, head_dim=128)
    bias = config.flag("attention_bias", False)
    layers = make_layers(config, head_dim=fields["head_dim"], window=qwen_windows(config))
    return DecoderSpec(family="qwen3", layers=layers, qk_norm=True, qkv_bias=bias, out_bias=bias, **fields)


QWEN3 = Recipe(family="qwen3", architectures=("Qwen3ForCausalLM",), model_types=("qwen3",), gguf="qwen3", read=_qwen3)
