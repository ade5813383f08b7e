"""GGUF files whose matrices stay packed: they stand for the numbers of the same file written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tests.models.fakes import gguf_tensors, quantised, tiny_model
from tests.models.test_gguf import random_blocks, save_gguf

from outrider.backends.cpu.gguf_packing import PACKINGS, pack_rows
from outrider.backends.cpu.packed import PackedMatrix
from outrider.backends.cpu.packing import CPUWeightForms
from outrider.models.load import load_model
from outrider.models.parameters import DecoderParameters, DenseMLP, ExpertsMLP, Matrix, plain, written_out


def matrices(parameters: DecoderParameters) -> list[Matrix]:
    found = [parameters.embedding, parameters.head.weight, parameters.final_norm]
    for layer in parameters.layers:
        mlp = layer.mlp
        found += [layer.qkv.weight, layer.out.weight, layer.mlp_norm]
        if isinstance(mlp, DenseMLP):
            found += [mlp.gate_up.weight, mlp.down.weight]
        else:
            found += [mlp.router.weight, mlp.gate_up, mlp.down]
    return found


def packed(path: Path) -> DecoderParameters:
    """Returns the packed parameters of a file that stand for those of the file written out."""
    found = load_model(str(path), dtype=torch.float32, forms=CPUWeightForms(packed=True)).parameters
    whole = load_model(str(path), dtype=torch.float32).parameters
    for one, other in zip(matrices(written_out(found)), matrices(whole), strict=True):
        assert torch.equal(plain(one), plain(other))
    return found


@pytest.mark.parametrize("kind", [Kind[name] for name in PACKINGS], ids=lambda kind: kind.name)
def test_packed_rows_stand_for_the_very_same_numbers(kind: Kind) -> None:
    stored, packing = random_blocks(kind, 7, 512), PACKINGS[kind.name]
    data = torch.empty(7, 512 // 32 * packing.block_bytes, dtype=torch.uint8)
    pack_rows(stored, kind.name, data)
    found = PackedMatrix.of(packing, data)
    assert found.shape == (7, 512)
    assert torch.equal(found.expand(), torch.from_numpy(np.array(gguf.dequantize(stored, kind))))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "llama, tied"])
def test_every_matrix_stays_packed(kind: Kind, family: str, tmp_path: Path) -> None:
    found = packed(save_gguf(tmp_path / "tiny.gguf", family, kind=kind, intermediate_size=64)[1])
    assert isinstance(found.embedding, PackedMatrix)
    assert isinstance(found.layers[0].qkv.weight, PackedMatrix)
    assert (found.head.weight is found.embedding) == (family == "llama, tied")


def test_experts_are_written_out_and_all_else_stays_packed(tmp_path: Path) -> None:
    """Kernels read packed matrices one at a time, and experts lie in one tensor."""
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32}
    for layer in packed(save_gguf(tmp_path / "tiny.gguf", "qwen3_moe", kind=Kind.Q4_0, **sizes)[1]).layers:
        assert isinstance(layer.mlp, ExpertsMLP)
        assert layer.mlp.gate_up.dtype == layer.mlp.down.dtype == torch.float32
        assert isinstance(layer.mlp.router.weight, PackedMatrix)
        assert isinstance(layer.qkv.weight, PackedMatrix)


def test_a_matrix_of_differently_stored_parts_is_written_out(tmp_path: Path) -> None:
    """As in files that keep more bits of some tensors: values in Q5_1 beside queries and keys in Q4_1."""
    finer = quantised(gguf_tensors(tiny_model("llama", intermediate_size=64), interleaved=True), Kind.Q5_1)
    values: dict[str, Any] = {name: tensor for name, tensor in finer.items() if "attn_v" in name}
    _, path = save_gguf(tmp_path / "tiny.gguf", "llama", kind=Kind.Q4_1, tensors=values, intermediate_size=64)
    for layer in packed(path).layers:
        assert isinstance(layer.qkv.weight, torch.Tensor)
        assert isinstance(layer.out.weight, PackedMatrix)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [True, False])
def test_packed_matrices_may_have_any_number_of_rows(kind: Kind, tied: bool, tmp_path: Path) -> None:
    """In memory they are filled up with rows that are no part of the matrix."""
    sizes: dict[str, Any] = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 40}
    sizes |= {"vocab_size": 61, "tie_word_embeddings": tied}
    tensors = gguf_tensors(tiny_model("qwen3", **sizes), interleaved=False)
    # Rows that are no whole blocks are not quantised.
    blocks = quantised({name: tensor for name, tensor in tensors.items() if tensor.shape[-1] % 32 == 0}, kind)
    found = packed(save_gguf(tmp_path / "tiny.gguf", "qwen3", tensors=blocks, **sizes)[1])
    rows = {found.embedding.shape[0], found.head.weight.shape[0]}
    for layer in found.layers:
        assert isinstance(layer.mlp, DenseMLP)
        for matrix in (layer.qkv.weight, layer.mlp.gate_up.weight):
            assert isinstance(matrix, PackedMatrix)
            rows.add(matrix.shape[0])
    assert rows == {61, 42, 80}
