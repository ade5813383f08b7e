"""Compiles for an H200, without a GPU, every kernel that a pass would launch, as the pass would specialise it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.backends.cuda.launching import Launch, observed

TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
SHARED_BYTES_MAX = 227 << 10
SPILLED_BYTES_MAX = 32
"""A few words, which the assembler of some versions spills to keep to a round number of registers."""
_PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


class Compiled(NamedTuple):
    name: str
    constants: dict[str, Any]
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """Returns what a call launches, without running it."""
    found: list[Launch] = []
    with observed(found.append):
        call()
    return found


def compiled(launched: Launch) -> Compiled:
    kernel, _grid, args, constants = launched
    options = {name: constants[name] for name in OPTIONS if name in constants}
    given = {name: value for name, value in constants.items() if name not in OPTIONS}
    signature, attributes = {}, {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            # Triton compiles the number 1 in.
            signature[name] = "constexpr"
            given[name] = value
        else:
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    for name in constants:
        if name not in OPTIONS:
            signature[name] = "constexpr"
    places = {(kernel.arg_names.index(name),): value for name, value in given.items()}
    source = ASTSource(kernel, signature, places, attributes)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = result.asm["ptx"]
    registers, spilled_bytes = usage(ptx)
    return Compiled(kernel.__name__, constants, registers, spilled_bytes, result.metadata.shared, ptx)


def usage(ptx: str) -> tuple[int, int]:
    """Returns the registers of a thread, and the bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        command = [_PTXAS, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)[0]
    return int(re.findall(r"Used (\d+) registers", said)[0]), int(stores) + int(loads)


def unlike(launches: list[Launch]) -> list[Launch]:
    """Leaves out launches that are specialised as another one is."""
    found: dict[object, Launch] = {}
    for each in launches:
        kernel, _grid, args, constants = each
        kinds = tuple(
            (value.dtype,)
            if isinstance(value, torch.Tensor)
            else (value == 1, isinstance(value, float), value % 16 == 0)
            for value in args
        )
        found.setdefault((kernel.__name__, kinds, tuple(constants.items())), each)
    return list(found.values())
