"""Transformers' version of a model, made in memory from one that is already loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.load import LoadedModel
from outrider.models.parameters import DecoderParameters, DenseMLP, LayerParameters, plain, written_out
from outrider.models.spec import Activation, DecoderSpec, RopeScaling, RopeSpec

ROPE_TYPES = {RopeScaling.NONE: "default", RopeScaling.LINEAR: "linear"}


def why_no_reference(spec: DecoderSpec) -> str | None:
    """Returns why this model cannot be compared with Transformers; None if it can."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "Transformers is not installed (pip install 'outrider[reference]')"
    biased = spec.qkv_bias or spec.out_bias or spec.mlp_bias
    simple = not (biased or spec.sinks or spec.attention_softcap or any(layer.experts for layer in spec.layers))
    if spec.family == "gemma3" and simple and all(layer.rope.scaling in ROPE_TYPES for layer in spec.layers):
        return None
    without_extras = not (spec.qk_norm or spec.post_norms or spec.logit_softcap) and spec.activation is Activation.SILU
    all_full = all(layer.window is None and layer.rope.scaling is RopeScaling.NONE for layer in spec.layers)
    if spec.family == "llama" and simple and without_extras and all_full:
        return None
    return f"the comparison with Transformers knows plain Llama and Gemma 3 models only, and this is {spec.family}"


def reference_model(model: LoadedModel) -> Any:
    """Builds Transformers' own class over this model's weights; quantised matrices are written out first."""
    assert why_no_reference(model.spec) is None
    kind, config, rotary = (_gemma3 if model.spec.family == "gemma3" else _llama)(model)
    with torch.device("meta"):
        reference = kind(config)
    device = model.parameters.embedding.device
    reference.load_state_dict(_state(model.spec, written_out(model.parameters, model.dtype)), assign=True, strict=True)
    # Rotary tables are not weights, so they are still on the meta device.
    reference.model.rotary_emb = rotary(config=config).to(device)
    if model.spec.embedding_scale != 1.0:
        reference.model.embed_tokens.embed_scale = torch.tensor(model.spec.embedding_scale, device=device)
    return reference.eval().requires_grad_(False)


def _llama(model: LoadedModel) -> tuple[Any, Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": model.spec.layers[0].rope.theta}
    return LlamaForCausalLM, LlamaConfig(**_common(model), rope_parameters=rope), LlamaRotaryEmbedding


def _gemma3(model: LoadedModel) -> tuple[Any, Any, Any]:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    spec = model.spec
    kinds = {"full_attention": None, "sliding_attention": None} | {
        "full_attention" if layer.window is None else "sliding_attention": layer.rope for layer in spec.layers
    }
    config = Gemma3TextConfig(
        **_common(model),
        query_pre_attn_scalar=round(spec.score_scale**-2),
        sliding_window=next((layer.window for layer in spec.layers if layer.window is not None), None),
        layer_types=["full_attention" if layer.window is None else "sliding_attention" for layer in spec.layers],
        rope_parameters={kind: _rope(rope) for kind, rope in kinds.items() if rope is not None},
        final_logit_softcapping=spec.logit_softcap,
    )
    return Gemma3ForCausalLM, config, Gemma3RotaryEmbedding


def _rope(rope: RopeSpec) -> dict[str, Any]:
    stretch = {} if rope.scaling is RopeScaling.NONE else {"factor": rope.factor}
    return {"rope_type": ROPE_TYPES[rope.scaling], "rope_theta": rope.theta, **stretch}


def _common(model: LoadedModel) -> dict[str, Any]:
    spec = model.spec
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_head,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": model.dtype,
    }


def _state(spec: DecoderSpec, parameters: DecoderParameters) -> dict[str, Tensor]:
    state = {
        "model.embed_tokens.weight": plain(parameters.embedding),
        "model.norm.weight": _norm(spec, parameters.final_norm),
        "lm_head.weight": plain(parameters.head.weight),
    }
    for number, layer in enumerate(parameters.layers):
        tensors = _matrices(spec, layer) | {name: _norm(spec, norm) for name, norm in _norms(layer).items()}
        state |= {f"model.layers.{number}.{name}.weight": tensor for name, tensor in tensors.items()}
    return state


def _matrices(spec: DecoderSpec, layer: LayerParameters) -> dict[str, Tensor]:
    assert isinstance(layer.mlp, DenseMLP)
    query, key, value = plain(layer.qkv.weight).split([spec.query_size, spec.kv_size, spec.kv_size])
    gate, up = plain(layer.mlp.gate_up.weight).chunk(2)
    return {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.o_proj": plain(layer.out.weight),
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": plain(layer.mlp.down.weight),
    }


def _norms(layer: LayerParameters) -> dict[str, Tensor]:
    named = {"input_layernorm": layer.input_norm}
    if layer.attention_post_norm is None:
        return named | {"post_attention_layernorm": layer.mlp_norm}
    assert layer.mlp_post_norm is not None
    assert layer.q_norm is not None and layer.k_norm is not None
    return named | {
        "post_attention_layernorm": layer.attention_post_norm,
        "pre_feedforward_layernorm": layer.mlp_norm,
        "post_feedforward_layernorm": layer.mlp_post_norm,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
    }


def _norm(spec: DecoderSpec, weight: Tensor) -> Tensor:
    """Gemma stores norm weights less 1. Subtracting it again is exact: loading added it to a number of as few bits."""
    return weight - 1.0 if spec.family == "gemma3" else weight
