"""GGUF files: tensors in many quantisations, under names and in an order of their own, turned into Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.recipes import recipe_for_gguf
from outrider.models.recipes.layout import Part
from outrider.models.weights.base import Checkpoint, Form, StoredTensor
from outrider.models.weights.gguf_config import config_from_metadata
from outrider.models.weights.gguf_file import Bytes, GGUFFile, GGUFTensor, read_gguf
from outrider.models.weights.gguf_packing import PACKINGS, pack_rows

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
FORMS: Mapping[Kind, Form] = {**PACKINGS, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
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
# Read into the configuration instead: they are no weights.
ROPE_TABLES = ("rope_freqs.weight",)

# At most what torch converts without starting threads: on a busy machine those cost more than they save.
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
            name: StoredTensor(tensor.shape, tensor.stop - tensor.start, FORMS.get(tensor.kind))
            for name, tensor in ((name, self.file.tensors[stored]) for name, stored in self._stored_names.items())
        }

    def stored_name(self, name: str) -> str:
        return self._stored_names.get(name) or gguf_name(name, self._block_names)

    def copy_into(self, part: Part, destination: Tensor) -> None:
        assert not part.transposed and not part.take, "GGUF stores tensors as they are used"
        name = part.name
        if destination.device.type != "cpu":
            # In one piece: many small copies to a device take longer than one tensor takes room.
            destination.copy_(self.tensor(name, destination.dtype))
            return
        tensor = self.file.tensors[self._stored_names[name]]
        rows = self._rows(name, tensor)
        if destination.dtype == torch.uint8:
            pack_rows(rows, tensor.kind, destination)
            return
        # Destinations of several experts may be no contiguous whole, but each expert's rows are.
        matrices = [destination] if destination.dim() < 3 else list(destination)
        height = rows.shape[0] // len(matrices)
        for number, matrix in enumerate(matrices):
            _dequantise_rows(rows[number * height : (number + 1) * height], tensor, matrix)

    def _rows(self, name: str, tensor: GGUFTensor) -> Bytes:
        """The stored bytes, one row per row of the tensor (per element of a vector), in Hugging Face's order."""
        rows = 1
        for size in tensor.shape[:-1] if len(tensor.shape) > 1 else tensor.shape:
            rows *= size
        stored = self.file.data[tensor.start : tensor.stop].reshape(rows, -1)
        heads = self._interleaved_heads(name)
        if heads is None:
            return stored
        # Blocks never span rows, so rows can be put in order before they are dequantised.
        half = rows // heads // 2
        return np.ascontiguousarray(stored.reshape(heads, half, 2, -1).swapaxes(1, 2)).reshape(rows, -1)

    def _interleaved_heads(self, name: str) -> int | None:
        if not self.recipe.gguf_interleaved_heads:
            return None
        match = re.search(r"\.self_attn\.([qk])_proj\.", name)
        if match is None:
            return None
        return int(self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])


def _dequantise_rows(rows: Bytes, tensor: GGUFTensor, destination: Tensor) -> None:
    per_row = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    step = max(1, CHUNK_ELEMENTS // per_row)
    for start in range(0, len(rows), step):
        chunk = np.array(rows[start : start + step])
        # As one long row: the library goes through longer arrays sixteen rows at a time.
        values = gguf.dequantize(chunk.reshape(1, -1), tensor.kind)
        target = destination[start : start + step]
        target.copy_(torch.from_numpy(values).view(target.shape))


def hf_name(name: str, block_names: Mapping[str, str] = BLOCK_NAMES) -> str:
    """Hugging Face's name of a GGUF tensor; a name that is not known stays as it is."""
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
    """The other way round, for messages about tensors that a file does not have."""
    for ours, theirs in _known_names(block_names):
        match = re.fullmatch(theirs.replace(".", r"\.").replace("#", r"(\d+)"), name)
        if match is not None:
            return ours.replace("#", match[1]) if match.groups() else ours
    return name


def _known_names(block_names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for kind in ("weight", "bias"):
        yield from ((f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in TOP_NAMES.items())
        yield from ((f"blk.#.{ours}.{kind}", f"model.layers.#.{theirs}.{kind}") for ours, theirs in block_names.items())
    yield from ((f"blk.#.{ours}.weight", f"model.layers.#.{theirs}") for ours, theirs in EXPERT_NAMES.items())


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
