"""The structure of a GGUF file: its metadata and the location of each tensor, without their meaning.

The gguf library's own reader makes several array objects per metadata string, which takes seconds for a
vocabulary; this one reads strings directly, and checks every length against the file before believing it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from outrider.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DIMENSIONS_MAX = 4

# Struct codes by the number of the type in the file.
SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    """The shape in the order of torch, rows first; the file has the reverse order."""
    start: int
    stop: int
    """The tensor is stored in bytes [start, stop) of the file."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: Bytes
    """The whole file, mapped."""


class _Truncated(Exception):
    pass


def read_gguf(path: Path) -> GGUFFile:
    """Maps a file and reads its header. Raises ModelError if the file is invalid."""
    try:
        size = path.stat().st_size
        # An empty file cannot be mapped.
        data: Bytes = np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, dtype=np.uint8)
    except OSError as problem:
        raise ModelError(f"{path} cannot be read: {problem}") from None
    try:
        metadata, tensors = _Header(path, data).read()
    except _Truncated:
        raise ModelError(f"{path} is truncated or corrupt: its header runs past its end; fetch it again") from None
    for name, tensor in tensors.items():
        if tensor.stop > size:
            raise ModelError(
                f"{path} is truncated: tensor {name} ends at byte {tensor.stop}, the file at {size}; fetch it again"
            )
    return GGUFFile(path, metadata, tensors, data)


class _Header:
    def __init__(self, path: Path, data: Bytes) -> None:
        self.path = path
        self.buffer: memoryview = data.data
        self.at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if bytes(self.buffer[:4]) != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it does not begin with {MAGIC.decode()!r}")
        self.at = 4
        version = self.scalar("I")
        if version not in VERSIONS:
            big_endian = struct.unpack("<I", struct.pack(">I", version))[0] in VERSIONS
            what = "is big-endian" if big_endian else f"has GGUF version {version}"
            raise ModelError(f"{self.path} {what}, which is not supported; supported: little-endian, version 2 and 3")
        tensor_count, metadata_count = self.scalar("Q"), self.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self.text()
            metadata[key] = self.value(self.scalar("I"))
        infos = [self.tensor_info() for _ in range(tensor_count)]
        return metadata, self.placed(infos, metadata.get("general.alignment", 32))

    def scalar(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from(f"<{code}", self.buffer, self.at)
        except struct.error:
            raise _Truncated from None
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        self.need(length)
        raw = bytes(self.buffer[self.at : self.at + length])
        self.at += length
        # A vocabulary may hold bytes that are no text; they must not make the file unreadable.
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, length = self.scalar("I"), self.scalar("Q")
            return self.array(inner, length)
        if kind not in SCALARS:
            raise ModelError(f"{self.path} is corrupt: metadata of unknown type {kind}")
        value = self.scalar(SCALARS[kind])
        # The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def array(self, kind: int, length: int) -> list[Any]:
        # Every element takes at least a byte, so a corrupt length is caught before anything is built.
        self.need(length)
        if kind in SCALARS:
            code = f"<{length}{SCALARS[kind]}"
            self.need(struct.calcsize(code))
            values = list(struct.unpack_from(code, self.buffer, self.at))
            self.at += struct.calcsize(code)
            return values
        if kind == STRING:
            return [self.text() for _ in range(length)]
        return [self.value(kind) for _ in range(length)]

    def need(self, count: int) -> None:
        if count > len(self.buffer) - self.at:
            raise _Truncated

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.text(), self.scalar("I")
        if dimensions > DIMENSIONS_MAX:
            raise ModelError(f"{self.path} is corrupt: tensor {name[:80]!r} has {dimensions} dimensions")
        sizes = tuple(self.scalar("Q") for _ in range(dimensions))
        return name, sizes[::-1], self.scalar("I"), self.scalar("Q")

    def placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: object) -> dict[str, GGUFTensor]:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self.path} is corrupt: general.alignment must be a power of two, got {alignment!r}")
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, number, offset in infos:
            if name in tensors:
                raise ModelError(f"{self.path} is corrupt: tensor {name} is in it twice")
            tensors[name] = self.tensor(name, shape, number, base + offset)
        return tensors

    def tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> GGUFTensor:
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name} has unknown type {number}; is the file corrupt?") from None
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block_elements:
            raise ModelError(
                f"{self.path} is corrupt: tensor {name} has shape {list(shape)}, "
                f"whose rows are no multiple of the {block_elements} elements of a {kind.name} block"
            )
        return GGUFTensor(kind, shape, start, start + prod(shape) // block_elements * block_bytes)
