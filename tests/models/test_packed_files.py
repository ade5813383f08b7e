"""Files whose matrices stay packed, and have any number of rows."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tests.models.fakes import gguf_metadata, gguf_tensors, quantised, tiny_model, write_gguf
from tests.models.test_gguf import matrices

from outrider.models.load import load_model
from outrider.models.packed import PackedMatrix
from outrider.models.parameters import DenseMLP, written_out


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [True, False])
def test_packed_matrices_may_have_any_number_of_rows(kind: Kind, tied: bool, tmp_path: Path) -> None:
    """In memory they are filled up; nobody sees those rows, and nobody can ask for them."""
    sizes = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 40}
    model = tiny_model("qwen3", vocab_size=61, tie_word_embeddings=tied, **sizes)
    tensors = gguf_tensors(model, interleaved=False)
    # Rows that are no whole blocks are not quantised.
    whole_blocks = {name: tensor for name, tensor in tensors.items() if tensor.shape[-1] % 32 == 0}
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3", gguf_metadata(model, "qwen3"), tensors | quantised(whole_blocks, kind))
    packed = load_model(str(path), dtype=torch.float32, as_stored=True).parameters
    whole = load_model(str(path), dtype=torch.float32).parameters
    rows = {packed.embedding.shape[0], packed.head.weight.shape[0]}
    for layer in packed.layers:
        assert isinstance(layer.mlp, DenseMLP)
        for matrix in (layer.qkv.weight, layer.mlp.gate_up.weight):
            assert isinstance(matrix, PackedMatrix)
            rows.add(matrix.shape[0])
    assert rows == {61, 42, 80}
    for one, other in zip(matrices(written_out(packed)), matrices(whole), strict=True):
        assert torch.equal(one, other)
