"""Weights as the CPU kernels take them: matrices as they are stored; norms, biases and sinks in float32."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from outrider.backends.attention import AttentionLayer
from outrider.backends.cpu.packed import PackedMatrix
from outrider.errors import ConfigError
from outrider.models.parameters import DecoderParameters, DenseMLP, ExpertsMLP, LayerParameters, Linear, Matrix, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_LAYER = struct.Struct("3qf4x4qf4xf4xq")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CPUAttentionLayer(AttentionLayer):
    """A layer's settings, with the words that describe them to kernels."""

    words: bytes
    """The words from HEADS to SINKS in `kernels/rotate.py`, with the addresses of the tensors above."""

    @classmethod
    def of(cls, layer: AttentionLayer) -> CPUAttentionLayer:
        if isinstance(layer, CPUAttentionLayer):
            return layer
        rotary = layer.rotary.float().contiguous()
        q_norm, k_norm, sinks = _maybe_wide(layer.q_norm), _maybe_wide(layer.k_norm), _maybe_wide(layer.sinks)
        words = _LAYER.pack(
            layer.heads,
            layer.kv_heads,
            layer.head_dim,
            layer.scale,
            rotary.data_ptr(),
            rotary.shape[1],
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            layer.norm_eps,
            0.0 if layer.softcap is None else layer.softcap,
            0 if sinks is None else sinks.data_ptr(),
        )
        converted = {"rotary": rotary, "q_norm": q_norm, "k_norm": k_norm, "sinks": sinks, "words": words}
        return cls(**{field.name: getattr(layer, field.name) for field in fields(layer)} | converted)


def prepared(parameters: DecoderParameters) -> DecoderParameters:
    return DecoderParameters(
        embedding=_stored(parameters.embedding),
        layers=tuple(_prepared_layer(layer) for layer in parameters.layers),
        final_norm=wide(parameters.final_norm),
        head=_prepared(parameters.head),
    )


def known(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        raise ConfigError(f"{str(dtype).removeprefix('torch.')} does not run on a CPU; choose one of {names}")
    return dtype


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous()


def _maybe_wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else wide(tensor)


def _prepared(linear: Linear) -> Linear:
    return Linear(weight=_stored(linear.weight), bias=_maybe_wide(linear.bias))


def _stored(weight: Matrix) -> Matrix:
    if isinstance(weight, PackedMatrix):
        return weight
    weight = plain(weight)
    known(weight.dtype)
    return weight if weight.stride(-1) == 1 else weight.contiguous()


def _prepared_layer(layer: LayerParameters) -> LayerParameters:
    mlp: DenseMLP | ExpertsMLP
    if isinstance(layer.mlp, DenseMLP):
        mlp = DenseMLP(gate_up=_prepared(layer.mlp.gate_up), down=_prepared(layer.mlp.down))
    else:
        mlp = ExpertsMLP(
            router=_prepared(layer.mlp.router),
            gate_up=plain(_stored(layer.mlp.gate_up)),
            down=plain(_stored(layer.mlp.down)),
            gate_up_bias=_maybe_wide(layer.mlp.gate_up_bias),
            down_bias=_maybe_wide(layer.mlp.down_bias),
        )
    return replace(
        layer,
        input_norm=wide(layer.input_norm),
        qkv=_prepared(layer.qkv),
        out=_prepared(layer.out),
        mlp_norm=wide(layer.mlp_norm),
        mlp=mlp,
        q_norm=_maybe_wide(layer.q_norm),
        k_norm=_maybe_wide(layer.k_norm),
        attention_post_norm=_maybe_wide(layer.attention_post_norm),
        mlp_post_norm=_maybe_wide(layer.mlp_post_norm),
        sinks=_maybe_wide(layer.sinks),
    )
