"""Tiny models of every family, as transformers saves them, and tiny GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GEMMA = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0}
GPT_OSS = {
    "head_dim": 16,
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "ministral": (
        "Ministral",
        {
            "sliding_window": 16,
            "head_dim": 8,
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    "qwen3, biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "head_dim": 16}),
    "qwen3_moe, some dense": ("Qwen3Moe", {**MOE, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3_moe, one dense": ("Qwen3Moe", {**MOE, "mlp_only_layers": [1]}),
    "gemma2": ("Gemma2", GEMMA | {"num_hidden_layers": 4, "attn_logit_softcapping": 2.0}),
    "gemma2, no caps": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 7, "sliding_window_pattern": 3}),
    "gemma3, one in six": (
        "Gemma3",
        GEMMA
        | {
            "num_hidden_layers": 12,
            "sliding_window": 16,
            "final_logit_softcapping": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gpt_oss": ("GptOss", GPT_OSS),
    "gpt_oss, one expert": ("GptOss", GPT_OSS | {"num_experts_per_tok": 1, "tie_word_embeddings": True}),
}
CONFIGURATIONS = {"Gemma3": "Gemma3TextConfig"}


def configuration(family: str, **changes: Any) -> Any:
    """Transformers' own."""
    name, fields = FAMILIES[family]
    # It writes into the dictionaries that it is given.
    return getattr(transformers, CONFIGURATIONS.get(name, f"{name}Config"))(**deepcopy(COMMON | fields | changes))


def tiny_model(family: str, **changes: Any) -> Any:
    """A random model of transformers' own, no two tensors alike."""
    name, _ = FAMILIES[family]
    config = configuration(family, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        # Norms and biases start out all alike, which would hide a mix-up.
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def tiny_tokenizer(size: int = 60) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    backend = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def save(model: Any, directory: Path, **options: Any) -> Path:
    """As Hugging Face lays it out, with a tokenizer."""
    model.save_pretrained(directory, **options)
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- GGUF -------------------------------------------------------------------------------------------

GGUF_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
# Where there are norms after attention too, the norm before feed-forward has another name.
GGUF_POST_NORMS = GGUF_BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of queries and keys."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model: Any, *, interleaved: bool) -> dict[str, np.ndarray]:
    """A model's tensors under GGUF's names and in its order."""
    config, tensors = model.config, {}
    gemma = config.model_type.startswith("gemma")
    block_names = GGUF_POST_NORMS if gemma else GGUF_BLOCK
    for name, parameter in model.state_dict().items():
        value = parameter.float().numpy().copy()
        if gemma and name.endswith("norm.weight"):
            value = value + np.float32(1.0)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.startswith("model.layers."):
            number, rest = name.removeprefix("model.layers.").split(".", 1)
            if rest == "mlp.experts.gate_up_proj":
                gate, up = np.split(value, 2, axis=1)
                tensors |= {f"blk.{number}.ffn_gate_exps.weight": gate, f"blk.{number}.ffn_up_exps.weight": up}
                continue
            if rest == "mlp.experts.down_proj":
                tensors[f"blk.{number}.ffn_down_exps.weight"] = value
                continue
            stem, kind = rest.rsplit(".", 1)
            if interleaved and stem.endswith(("q_proj", "k_proj")):
                is_query = stem.endswith("q_proj")
                value = interleave(value, config.num_attention_heads if is_query else config.num_key_value_heads)
            tensors[f"blk.{number}.{block_names[stem]}.{kind}"] = value
        else:
            stem, kind = name.rsplit(".", 1)
            tensors[f"{GGUF_TOP[stem]}.{kind}"] = value
    return tensors


def gguf_metadata(model: Any, architecture: str) -> dict[str, Any]:
    config = model.config
    fields: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10000.0,
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        fields["attention.key_length"] = head_dim
    if architecture == "qwen3moe":
        fields |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if architecture.startswith("gemma"):
        fields |= {"attention.sliding_window": config.sliding_window, "attention.value_length": head_dim}
        fields |= {
            name: getattr(config, name)
            for name in ("attn_logit_softcapping", "final_logit_softcapping")
            if getattr(config, name) is not None
        }
    if architecture == "gemma3":
        everywhere = config.rope_parameters["full_attention"]
        fields["rope.freq_base"] = everywhere["rope_theta"]
        if everywhere["rope_type"] == "linear":
            fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": everywhere["factor"]}
    return {f"{architecture}.{name}": value for name, value in fields.items()} | tiny_vocabulary()


def tiny_vocabulary(size: int = 60) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": alphabet,
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.eos_token_id": 0,
    }


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
) -> Path:
    """Tensors are float32 arrays, or stored bytes and what they are."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {value!r}")


def quantised(tensors: Mapping[str, np.ndarray], kind: gguf.GGMLQuantizationType) -> dict[str, Any]:
    """Matrices in this quantisation, vectors as float32."""
    return {name: value if value.ndim == 1 else (gguf.quantize(value, kind), kind) for name, value in tensors.items()}
