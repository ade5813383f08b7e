"""Llama and the models that share its shape: SmolLM2, Llama 2 and 3, Mistral, Ministral."""

from __future__ import annotations

from outrider.errors import ModelError
from outrider.models.recipes.base import Recipe, common_fields, make_layers, optional_window, windows_by_layer_type
from outrider.models.recipes.config import ConfigReader
from outrider.models.spec import DecoderSpec


def _llama(config: ConfigReader) -> DecoderSpec:
    if config.has("num_local_experts"):
        # GGUF calls mixtures such as Mixtral "llama" as well.
        raise ModelError(f"{config.source}: mixtures of experts of the llama architecture are not supported")
    fields = common_fields(config)
    bias = config.flag("attention_bias", False)
    return DecoderSpec(
        family="llama",
        layers=make_layers(config, head_dim=fields["head_dim"]),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        **fields,
    )


def _mistral(config: ConfigReader) -> DecoderSpec:
    fields = common_fields(config, kv_heads=8)
    window = windows_by_layer_type(config, optional_window(config), default=lambda _: True)
    return DecoderSpec(
        family="mistral", layers=make_layers(config, head_dim=fields["head_dim"], window=window), **fields
    )


LLAMA = Recipe(
    family="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    gguf="llama",
    gguf_interleaved_heads=True,
    read=_llama,
)
MISTRAL = Recipe(
    family="mistral",
    architectures=("MistralForCausalLM", "MinistralForCausalLM"),
    model_types=("mistral", "ministral"),
    read=_mistral,
)
