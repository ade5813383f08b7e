"""Hugging Face directories: config.json, and model.safetensors whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.recipes import recipe_for
from outrider.models.recipes.layout import Part
from outrider.models.weights import mxfp4
from outrider.models.weights.base import Checkpoint, StoredTensor, taken

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
INTEGER_BYTES = {"I64": 8, "I32": 4, "BOOL": 1}
BLOCK_BYTES = {"U8": 1}


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelError(f"{path} cannot be read: {problem}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


class TensorFiles:
    """The safetensors of a directory, whole or in shards. Only headers are read until a tensor is asked for."""

    def __init__(self, directory: Path, *, integers: bool = False, blocks: bool = False) -> None:
        """`integers`: tables of token ids are allowed beside weights. `blocks`: bytes of quantised weights are
        allowed."""
        element_bytes = ELEMENT_BYTES | (INTEGER_BYTES if integers else {}) | (BLOCK_BYTES if blocks else {})
        self._files = {name: _open(directory / name) for name in _shards(directory)}
        self._file_of: dict[str, str] = {}
        tensors: dict[str, StoredTensor] = {}
        for file_name, file in self._files.items():
            for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                if name in tensors:
                    raise ModelError(f"{directory}: tensor {name} is in both {self._file_of[name]} and {file_name}")
                self._file_of[name] = file_name
                tensors[name] = _stored(name, file.get_slice(name), directory / file_name, element_bytes)
        self.tensors: Mapping[str, StoredTensor] = tensors

    def mapped(self, name: str) -> Tensor:
        """Returns a view of the mapped file, which is read from disk when the tensor is read."""
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor


class SafetensorsCheckpoint(Checkpoint):
    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config, self.config_source = _read_config(directory)
        self.recipe = recipe_for(self.config, self.config_source)
        quantised = _quantisation(self.config) if self.recipe.mxfp4 else None
        if quantised != mxfp4.METHOD:
            _refuse_quantised(self.config, self.config_source)
        self._files = TensorFiles(directory, blocks=quantised is not None)
        tensors: Mapping[str, StoredTensor] = self._files.tensors
        self._pairs: Mapping[str, mxfp4.BlockPair] = {}
        if quantised is not None:
            tensors, self._pairs = mxfp4.paired(tensors, str(directory))
        self._stored = {self._our_name(name): name for name in tensors}
        if len(self._stored) != len(tensors):
            raise ModelError(f"{directory} has some tensors twice, with and without a prefix; is it a complete model?")
        self.tensors = {name: tensors[stored] for name, stored in self._stored.items()}

    def _our_name(self, stored: str) -> str:
        for theirs, ours in self.recipe.prefixes:
            if stored.startswith(theirs):
                return ours + stored.removeprefix(theirs)
        return stored

    def stored_name(self, name: str) -> str:
        return self._stored.get(name, name)

    def copy_into(self, part: Part, destination: Tensor) -> None:
        stored = self._stored[part.name]
        pair = self._pairs.get(stored)
        if pair is None:
            destination.copy_(taken(self._files.mapped(stored), part))
            return
        blocks, scales = self._files.mapped(pair.blocks), self._files.mapped(pair.scales)
        assert part.take[:1] in ((), (slice(None),)), "experts are read one by one"
        of_one = replace(part, take=part.take[1:])
        for number, place in enumerate(destination):
            place.copy_(taken(mxfp4.dequantise(blocks[number], scales[number]).T, of_one))


def read_config(directory: Path) -> tuple[dict[str, Any], str]:
    """Returns the config.json of a directory whose weights are not quantised, and its path for messages."""
    config, source = _read_config(directory)
    _refuse_quantised(config, source)
    return config, source


def _read_config(directory: Path) -> tuple[dict[str, Any], str]:
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing; a model directory needs it beside its weights")
    return read_json(path), str(path)


def _shards(directory: Path) -> list[str]:
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{directory / INDEX} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        # The index is untrusted: it may name files of this directory only.
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{directory / INDEX} names files outside its own directory")
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelError(f"{directory}: the index names shards that are missing: {', '.join(missing)}")
        return names
    if (directory / SINGLE).is_file():
        return [SINGLE]
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    hint = f"; {other[0]} is not read, since such files can run code: convert it to safetensors" if other else ""
    raise ModelError(f"{directory} has neither {SINGLE} nor {INDEX}{hint}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise ModelError(f"{path} is not a complete safetensors file: {problem}; fetch it again") from None


def _stored(name: str, piece: Any, path: Path, element_bytes: Mapping[str, int]) -> StoredTensor:
    shape, kind = tuple(piece.get_shape()), piece.get_dtype()
    if kind not in element_bytes:
        supported = ", ".join(sorted(element_bytes))
        raise ModelError(f"{path}: tensor {name} is stored as {kind}, which is not supported; supported: {supported}")
    return StoredTensor(shape, prod(shape) * element_bytes[kind], kind)


def _quantisation(config: Mapping[str, Any]) -> str | None:
    settings = config.get("quantization_config")
    if not settings:
        return None
    return str(settings.get("quant_method", "unnamed")) if isinstance(settings, Mapping) else "unnamed"


def _refuse_quantised(config: Mapping[str, Any], source: str) -> None:
    method = _quantisation(config)
    if method is not None:
        raise ModelError(
            f"{source}: weights quantised with {method!r} are not supported in safetensors; "
            "use the unquantised model, or a GGUF file of it"
        )
