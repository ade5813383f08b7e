"""Weights as kernels of a CPU take them: as they are stored, and in float32 what is added or multiplied elementwise."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.packed import PackedMatrix
from outrider.models.parameters import DecoderParameters, DenseMLP, ExpertsMLP, LayerParameters, Linear, Matrix, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
