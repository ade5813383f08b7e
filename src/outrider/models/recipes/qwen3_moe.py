"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers, and a window on all layers or on none."""

from __future__ import annotations

from collections.abc import Callable

from outrider.models.recipes.base import (
    EXPERTS_MAX,
    Recipe,
    common_fields,
    make_layers,
    optional_window,
    windows_by_layer_type,
)
from outrider.models.recipes.config import ConfigReader
from outrider.models.spec import DecoderSpec, ExpertsSpec


def _experts(config: ConfigReader) -> Callable[[int], ExpertsSpec | None]:
    # Newer configurations call the count num_local_experts.
    name = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    count, step = config.integer(name), config.integer("decoder_sparse_step", 1)
    if not 0 <= count <= EXPERTS_MAX:
        raise config.wrong(name, f"between 0 and {EXPERTS_MAX}")
    if step < 1:
        raise config.wrong("decoder_sparse_step", "at least 1")
    dense = set(config.integer_list("mlp_only_layers"))
    if count == 0:
        return lambda _: None
    experts = ExpertsSpec(
        count=count,
        per_token=config.integer("num_experts_per_tok", 8),
        intermediate_size=config.integer("moe_intermediate_size", 768),
        softmax_first=True,
        normalise_chosen=config.flag("norm_topk_prob", False),
    )
    return lambda number: None if number in dense or (number + 1) % step else experts


def _qwen3_moe(config: ConfigReader) -> DecoderSpec:
    fields = common_fields(config, kv_heads=4)
    bias = config.flag("attention_bias", False)
    in_use = optional_window(config) if config.flag("use_sliding_window", False) else None
    window = windows_by_layer_type(config, in_use, default=lambda _: True)
    layers = make_layers(config, head_dim=fields["head_dim"], window=window, experts=_experts(config))
    return DecoderSpec(family="qwen3_moe", layers=layers, qk_norm=True, qkv_bias=bias, out_bias=bias, **fields)


QWEN3_MOE = Recipe(
    family="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    gguf="qwen3moe",
    read=_qwen3_moe,
)
