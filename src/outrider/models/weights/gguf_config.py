"""Conversion of the metadata of a GGUF file to a Hugging Face configuration."""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np

from outrider.errors import ModelError
from outrider.models.weights.gguf_file import GGUFFile

REQUIRED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# A file stores the table that results from Llama 3's scaling, without these numbers.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_from_metadata(file: GGUFFile) -> dict[str, Any]:
    architecture = file.metadata["general.architecture"]
    config: dict[str, Any] = {"model_type": architecture}
    for names, required in ((REQUIRED, True), (OPTIONAL, False)):
        for key, name in names.items():
            value = _uniform(file, f"{architecture}.{key}", file.metadata.get(f"{architecture}.{key}"))
            if value is not None:
                config[name] = value
            elif required:
                raise ModelError(f"{file.path} has no metadata {architecture}.{key}; is it a complete model?")
    if not config.get("num_local_experts"):
        config.pop("num_local_experts", None)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // max(config["num_attention_heads"], 1))
    config["vocab_size"] = _vocab_size(file)
    config["sliding_window"] = config.get("sliding_window") or None
    config["use_sliding_window"] = config["sliding_window"] is not None
    config["norm_topk_prob"] = True
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    for token in ("bos", "eos"):
        config[f"{token}_token_id"] = file.metadata.get(f"tokenizer.ggml.{token}_token_id")
    config |= _pattern(file.metadata.get(f"{architecture}.attention.sliding_window_pattern"))
    return config | _rope(file, architecture, config)


def _pattern(value: Any) -> dict[str, Any]:
    """Returns the setting for layers with a window, which the file stores as a period or as a flag for each layer."""
    if isinstance(value, list):
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in value]}
    return {} if value is None else {"sliding_window_pattern": value}


def _uniform(file: GGUFFile, key: str, value: Any) -> Any:
    """Returns a value that may be stored for each layer, but must be the same for all of them."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ModelError(f"{file.path}: {key} differs from layer to layer, which is not supported")
    return value[0]


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight; is it a complete model?")
    return embedding.shape[0]


def _rope(file: GGUFFile, architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    metadata, head_dim = file.metadata, config["head_dim"]
    rotary_dim = metadata.get(f"{architecture}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise ModelError(
            f"{file.path}: only {rotary_dim} of {head_dim} elements of a head are rotated, "
            "which is not supported in GGUF; use the Hugging Face directory of the model"
        )
    prefix = f"{architecture}.rope.scaling"
    kind = metadata.get(f"{prefix}.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return {"rope_scaling": _llama3_scaling(file, config)}
    if kind == "none":
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.get(f"{prefix}.factor")}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": metadata.get(f"{prefix}.original_context_length"),
            "beta_fast": metadata.get(f"{prefix}.yarn_beta_fast"),
            "beta_slow": metadata.get(f"{prefix}.yarn_beta_slow"),
        }
        extra = metadata.get(f"{prefix}.attn_factor", metadata.get(f"{prefix}.yarn_attn_factor"))
        if extra is not None and scaling["factor"]:
            # GGUF stores a factor on top of the recommended one, Hugging Face their product.
            scaling["attention_factor"] = extra * (0.1 * math.log(max(scaling["factor"], 1.0)) + 1.0)
    return {"rope_scaling": scaling}


def _llama3_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the scaling that gives the stored table of divisors, if the table is Llama 3's."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.kind != gguf.GGMLQuantizationType.F32:
        raise ModelError(f"{file.path}: rope_freqs.weight must be F32, it is {tensor.kind.name}")
    stored = np.array(file.data[tensor.start : tensor.stop]).view(np.float32)
    factor = float(stored.max(initial=1.0))
    expected = _llama3_divisors(factor, config["head_dim"], config.get("rope_theta", 10_000.0))
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(
            f"{file.path}: rope_freqs.weight is not the table of Llama 3, the only one that is supported; "
            "use the Hugging Face directory of the model"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _llama3_divisors(factor: float, head_dim: int, theta: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    low, high, original = LLAMA3.values()
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelengths - low) / (high - low)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelengths < original / high, 1.0, divisors)
    return np.where(wavelengths > original / low, factor, divisors)
