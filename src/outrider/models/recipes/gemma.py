"""Gemma 2 and Gemma 3: norms on both sides, windows on most layers, scaled embeddings, soft caps.

Gemma 2 alternates windows with full attention. Gemma 3 has one layer of full attention in six, with a rotary base
of its own, and norms over the heads of queries and keys. Norm weights are stored less 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outrider.errors import ModelError
from outrider.models.recipes.base import Recipe, common_fields, make_layers, optional_window, periodic_windows
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.layout import Layout, decoder_layout
from outrider.models.recipes.rope import FULL, LAYER_KINDS, SLIDING, rope_from
from outrider.models.spec import DecoderSpec, RopeSpec

# Hugging Face's defaults, which configurations omit.
DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}
GEMMA2_DEFAULTS = DEFAULTS | {"vocab_size": 256_000, "max_position_embeddings": 8192}
GEMMA3_DEFAULTS = DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}
GEMMA3_PERIOD = 6

GGUF_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gemma2(config: ConfigReader) -> DecoderSpec:
    config = config.with_defaults(GEMMA2_DEFAULTS)
    fields = _fields(config)
    window = periodic_windows(config, window=optional_window(config), period=2)
    return DecoderSpec(
        family="gemma2",
        layers=make_layers(config, head_dim=fields["head_dim"], window=window),
        attention_softcap=config.soft_cap("attn_logit_softcapping", 50.0),
        logit_softcap=config.soft_cap("final_logit_softcapping", 30.0),
        **fields,
    )


def _gemma3(config: ConfigReader) -> DecoderSpec:
    config = config.with_defaults(GEMMA3_DEFAULTS)
    if config.has("attn_logit_softcapping"):
        raise ModelError(
            f"{config.source}: attn_logit_softcapping is not supported for Gemma 3: no released model has it, and "
            "Transformers does not apply it"
        )
    fields = _fields(config)
    period = config.integer("sliding_window_pattern", GEMMA3_PERIOD)
    if period < 1:
        raise config.wrong("sliding_window_pattern", "at least 1")
    window = periodic_windows(config, window=optional_window(config), period=period)
    return DecoderSpec(
        family="gemma3",
        layers=make_layers(
            config, head_dim=fields["head_dim"], window=window, rope=_rope_by_kind(config, fields["head_dim"])
        ),
        qk_norm=True,
        logit_softcap=config.soft_cap("final_logit_softcapping"),
        **fields,
    )


def _gemma3_multimodal(config: ConfigReader) -> DecoderSpec:
    """Reads the text part of a multimodal model."""
    text = config.section("text_config")
    tied = {name: config.fields[name] for name in ("tie_word_embeddings",) if config.has(name)}
    return _gemma3(replace(text, fields={**text.fields, **tied}))


def _fields(config: ConfigReader) -> dict[str, Any]:
    if config.flag("use_bidirectional_attention", False):
        raise ModelError(
            f"{config.source}: use_bidirectional_attention is not supported: such models do not generate text"
        )
    scalar = config.positive("query_pre_attn_scalar")
    fields = common_fields(config)
    bias = config.flag("attention_bias", False)
    return fields | {
        "activation": config.activation("hidden_activation", "gelu_pytorch_tanh"),
        "post_norms": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "query_scale": scalar**-0.5,
        "embedding_scale": fields["hidden_size"] ** 0.5,
    }


def _rope_by_kind(config: ConfigReader, head_dim: int) -> Callable[[str], RopeSpec]:
    """Returns the rotary embedding by kind of layer, from either spelling.

    New: `rope_parameters` per kind. Old: `rope_theta` and `rope_scaling` for full attention, `rope_local_base_freq`
    for windows.
    """
    given = config.section("rope_parameters").fields
    if given and not any(kind in given for kind in LAYER_KINDS):
        raise config.wrong("rope_parameters", f"a dictionary for each of {' and '.join(LAYER_KINDS)}")
    parameters = {kind: dict(config.inner("rope_parameters", given).section(kind).fields) for kind in LAYER_KINDS}
    parameters[FULL] |= config.section("rope_scaling").fields
    for kind, name in ((FULL, "rope_theta"), (SLIDING, "rope_local_base_freq")):
        if parameters[kind].get("rope_theta") is None and config.has(name):
            parameters[kind]["rope_theta"] = config.fields[name]
    return lambda kind: rope_from(config, parameters[kind], head_dim=head_dim, theta=THETA[kind])


def gemma_layout(spec: DecoderSpec) -> Layout:
    return {
        path: replace(assembly, plus=1.0, wide=True) if path.endswith("norm") else assembly
        for path, assembly in decoder_layout(spec).items()
    }


def _query_scalar_by_size(layers_of_largest: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Derives query_pre_attn_scalar, which GGUF omits: the head size, except in the 27B model with narrower heads."""

    def fields(config: Mapping[str, Any]) -> dict[str, Any]:
        largest = config["num_hidden_layers"] == layers_of_largest
        scalar = config["hidden_size"] // max(1, config["num_attention_heads"]) if largest else config["head_dim"]
        return {"query_pre_attn_scalar": scalar}

    return fields


GEMMA2 = Recipe(
    family="gemma2",
    architectures=("Gemma2ForCausalLM",),
    model_types=("gemma2",),
    gguf="gemma2",
    gguf_names=GGUF_NAMES,
    gguf_fields=_query_scalar_by_size(46),
    read=_gemma2,
    layout=gemma_layout,
)
GEMMA3 = Recipe(
    family="gemma3",
    architectures=("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    gguf="gemma3",
    gguf_names=GGUF_NAMES,
    gguf_fields=_query_scalar_by_size(62),
    read=_gemma3,
    layout=gemma_layout,
)
GEMMA3_MULTIMODAL = Recipe(
    family="gemma3",
    architectures=("Gemma3ForConditionalGeneration",),
    model_types=("gemma3",),
    prefixes=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    other_parts=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    read=_gemma3_multimodal,
    layout=gemma_layout,
)
