"""The same model in Transformers, made in memory from a model that is loaded already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.load import LoadedModel
from outrider.models.parameters import DecoderParameters, DenseMLP, plain, written_out
from outrider.models.spec import Activation, DecoderSpec, RopeScaling


def why_no_reference(spec: DecoderSpec) -> str | None:
    """None if Transformers can be compared with; else the reason, for people."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return "Transformers is not installed (pip install 'outrider[reference]')"
    plain = not (
        spec.qk_norm
        or spec.post_norms
        or spec.qkv_bias
        or spec.out_bias
        or spec.mlp_bias
        or spec.sinks
        or spec.attention_softcap
        or spec.logit_softcap
    )
    layers = all(
        layer.window is None and layer.experts is None and layer.rope.scaling is RopeScaling.NONE
        for layer in spec.layers
    )
    if spec.family != "llama" or spec.activation is not Activation.SILU or not plain or not layers:
        return f"the comparison with Transformers knows plain Llama models only, and this is {spec.family}"
    return None


def reference_model(model: LoadedModel) -> Any:
    """A LlamaForCausalLM with this model's weights: the same tensors, or what stored ones stand for."""
    assert why_no_reference(model.spec) is None
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    llama: Any = LlamaForCausalLM  # half of Transformers has no types
    spec = model.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.layers[0].rope.theta},
        tie_word_embeddings=spec.tied_head,
        bos_token_id=None,
        eos_token_id=None,
        dtype=model.dtype,
    )
    with torch.device("meta"):
        reference = llama(config)
    reference.load_state_dict(_state(spec, written_out(model.parameters, model.dtype)), assign=True, strict=True)
    # Its tables are no weights, so they are still on the meta device.
    reference.model.rotary_emb = LlamaRotaryEmbedding(config=config).to(model.parameters.embedding.device)
    return reference.eval().requires_grad_(False)


def _state(spec: DecoderSpec, parameters: DecoderParameters) -> dict[str, Tensor]:
    state = {
        "model.embed_tokens.weight": plain(parameters.embedding),
        "model.norm.weight": parameters.final_norm,
        "lm_head.weight": plain(parameters.head.weight),
    }
    for number, layer in enumerate(parameters.layers):
        assert isinstance(layer.mlp, DenseMLP)
        query, key, value = plain(layer.qkv.weight).split([spec.query_size, spec.kv_size, spec.kv_size])
        gate, up = plain(layer.mlp.gate_up.weight).chunk(2)
        tensors = {
            "input_layernorm": layer.input_norm,
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": plain(layer.out.weight),
            "post_attention_layernorm": layer.mlp_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": plain(layer.mlp.down.weight),
        }
        state |= {f"model.layers.{number}.{name}.weight": tensor for name, tensor in tensors.items()}
    return state
