"""GGUF files: tensors in many quantisations, converted to the names and the row order of Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.recipes import recipe_for_gguf
from outrider.models.recipes.layout import Part
from outrider.models.weights.base import Checkpoint, StoredTensor
from outrider.models.weights.gguf_config import config_from_metadata
from outrider.models.weights.gguf_file import Bytes, GGUFFile, GGUFTensor, read_gguf

SUPPORTED = (
    Kind.F32,
    Kind.F16,
    Kind.BF16,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q8_0,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
)
TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# All experts in one tensor; Hugging Face names such tensors without ".weight".
EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# These are not weights; they are read into the configuration.
ROPE_TABLES = ("rope_freqs.weight",)

# The most elements that torch converts without starting threads, which cost more than they save on a busy machine.
CHUNK_ELEMENTS = 1 << 15


class GGUFCheckpoint(Checkpoint):
    complete_norms = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_source = str(path)
        self.file = read_gguf(path)
        metadata = self.file.metadata
        _refuse_split(self.file)
        self.recipe = recipe_for_gguf(metadata.get("general.architecture"), str(path))
        _refuse_quantisation(self.file)
        self.config = config_from_metadata(self.file)
        self.config |= self.recipe.gguf_fields(self.config)
        self._block_names = {**BLOCK_NAMES, **self.recipe.gguf_names}
        self._stored_names = {
            hf_name(name, self._block_names): name for name in self.file.tensors if name not in ROPE_TABLES
        }
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(
                tensor.shape,
                tensor.stop - tensor.start,
                tensor.kind.name,
                # Not a method: a checkpoint that its own tensors refer to would keep the file mapped after loading.
                partial(_stored_rows, self.file.data, tensor, self._interleaved_heads(name)),
            )
            for name, tensor in ((name, self.file.tensors[stored]) for name, stored in self._stored_names.items())
        }

    def stored_name(self, name: str) -> str:
        return self._stored_names.get(name) or gguf_name(name, self._block_names)

    def copy_into(self, part: Part, destination: Tensor) -> None:
        assert not part.transposed and not part.take, "GGUF stores tensors as they are used"
        name = part.name
        if destination.device.type != "cpu":
            # In one piece, since many small copies to a device are slow.
            destination.copy_(self.tensor(name, destination.dtype))
            return
        tensor = self.file.tensors[self._stored_names[name]]
        rows = _stored_rows(self.file.data, tensor, self._interleaved_heads(name))
        # A destination of several experts may have gaps between experts, but the rows of each are contiguous.
        matrices = [destination] if destination.dim() < 3 else list(destination)
        height = rows.shape[0] // len(matrices)
        for number, matrix in enumerate(matrices):
            _dequantise_rows(rows[number * height : (number + 1) * height], tensor, matrix)

    def _interleaved_heads(self, name: str) -> int | None:
        if not self.recipe.gguf_interleaved_heads:
            return None
        match = re.search(r"\.self_attn\.([qk])_proj\.", name)
        if match is None:
            return None
        return int(self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])


def _stored_rows(data: Bytes, tensor: GGUFTensor, interleaved_heads: int | None) -> Bytes:
    """Returns the stored bytes in Hugging Face's order: one row for each row of a matrix or element of a vector."""
    rows = prod(tensor.shape[:-1] or tensor.shape)
    stored = data[tensor.start : tensor.stop].reshape(rows, -1)
    if interleaved_heads is None:
        return stored
    # Blocks never span rows, so rows can be put in order before they are dequantised.
    half = rows // interleaved_heads // 2
    return np.ascontiguousarray(stored.reshape(interleaved_heads, half, 2, -1).swapaxes(1, 2)).reshape(rows, -1)


def _dequantise_rows(rows: Bytes, tensor: GGUFTensor, destination: Tensor) -> None:
    per_row = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    step = max(1, CHUNK_ELEMENTS // per_row)
    for start in range(0, len(rows), step):
        chunk = np.array(rows[start : start + step])
        # As one long row: the library processes arrays with more rows sixteen rows at a time.
        values = gguf.dequantize(chunk.reshape(1, -1), tensor.kind)
        target = destination[start : start + step]
        target.copy_(torch.from_numpy(values).view(target.shape))


def hf_name(name: str, block_names: Mapping[str, str] = BLOCK_NAMES) -> str:
    """Returns Hugging Face's name of a GGUF tensor. An unknown name is returned as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    block, stem, kind = match.groups()
    if block is None:
        return f"{TOP_NAMES[stem]}.{kind}" if stem in TOP_NAMES else name
    if stem in EXPERT_NAMES and kind == "weight":
        return f"model.layers.{block}.{EXPERT_NAMES[stem]}"
    return f"model.layers.{block}.{block_names[stem]}.{kind}" if stem in block_names else name


def gguf_name(name: str, block_names: Mapping[str, str] = BLOCK_NAMES) -> str:
    """Returns the GGUF name for a name of Hugging Face, for messages about tensors that a file does not have."""
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+?)(\.weight|\.bias)?", name)
    assert match is not None
    block, stem, kind = match.groups()
    names = TOP_NAMES if block is None else {**block_names, **EXPERT_NAMES}
    found = next((ours for ours, theirs in names.items() if theirs == stem), None)
    if found is None:
        return name
    return f"{'' if block is None else f'blk.{block}.'}{found}{kind or '.weight'}"


def _refuse_split(file: GGUFFile) -> None:
    count = file.metadata.get("split.count", 1)
    if count > 1:
        raise ModelError(f"{file.path} is one of {count} parts; join them first: llama-gguf-split --merge")


def _refuse_quantisation(file: GGUFFile) -> None:
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 1 and tensor.kind not in (Kind.F32, Kind.F16, Kind.BF16):
            raise ModelError(
                f"{file.path}: tensor {name} is a vector, but quantised as {tensor.kind.name}; norms and biases must "
                "be F32, F16 or BF16: convert the model again"
            )
        if tensor.kind not in SUPPORTED:
            supported = ", ".join(kind.name for kind in SUPPORTED)
            raise ModelError(
                f"{file.path}: tensor {name} is quantised as {tensor.kind.name}, which is not supported; "
                f"supported: {supported}"
            )
