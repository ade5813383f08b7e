"""Quantisation of float32 rows to 16-bit integers, the form in which they are multiplied with packed weights.

A block of 32 elements has a scale of its own, its largest magnitude over 32767, so the error of an element is at most
1/65534 of that magnitude. Sums of products of integers are exact in any order, and the rest of a product has one lane
for each weight row. A product is therefore the same whatever else is in the batch, and on every processor.

    72 bytes for each block: 32 integers, their scale, the scale times their sum

In every four integers the second and third are swapped, to match weights that are unpacked from alternate bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from outrider.backends.cpu.kernels.compiling import OPTIONS
from outrider.backends.cpu.kernels.memory import F32, I32, I64, Builder, declare, pointer
from outrider.backends.cpu.kernels.vector import (
    LANE_BYTES,
    LANES,
    ROUNDER,
    constant,
    emit_fma,
    emit_load,
    emit_splat,
    words,
)

BLOCK = 32
BLOCK_BYTES = 72
SCALE_AT, SUM_AT = 64, 68

_LARGEST = 32767.0
_NOTHING = 2.0**-100
"""A block whose largest magnitude is below this becomes zeros: the inverse of its scale would be infinite."""
_ROUNDER_BITS = 0x4B400000  # the bits of ROUNDER
_WORDS = words(0).type
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_ORDER = [lane - lane % 4 + (0, 2, 1, 3)[lane % 4] for lane in range(LANES)]


def _reduced(builder: Builder, operation: str, vectors: list[Builder], pair: Any) -> Builder:
    whole = vectors[0]
    for each in vectors[1:]:
        whole = pair(whole, each)
    kind = ir.FunctionType(I32, [_WORDS])
    return builder.call(declare(builder, f"llvm.vector.reduce.{operation}.v{LANES}i32", kind), [whole])


@intrinsic
def _narrow_block(typingctx, x, out):
    def codegen(context, builder, signature, args):
        x, out = args
        values = [emit_load(builder, builder.add(x, I64(number * LANE_BYTES))) for number in range(BLOCK // LANES)]
        # Compared as bits, so that NaN is larger than any number and becomes the scale.
        sizes = [builder.and_(builder.bitcast(value, _WORDS), words(0x7FFFFFFF)) for value in values]

        def larger(a, b):
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        largest = builder.bitcast(_reduced(builder, "smax", sizes, larger), F32)
        nothing = builder.fcmp_ordered("<", largest, F32(_NOTHING))
        inverse = builder.select(nothing, F32(0.0), builder.fdiv(F32(_LARGEST), largest))
        scale = builder.select(nothing, F32(0.0), builder.fmul(largest, F32(1.0 / _LARGEST)))
        factor = emit_splat(builder, inverse)
        bits = [builder.bitcast(emit_fma(builder, value, factor, constant(ROUNDER)), _WORDS) for value in values]
        for number, each in enumerate(bits):
            shorts = builder.trunc(each, _SHORTS)
            ordered = builder.shuffle_vector(shorts, shorts, ir.Constant(ir.VectorType(I32, LANES), _ORDER))
            at = builder.add(out, I64(number * LANES * 2))
            builder.store(ordered, pointer(builder, at, _SHORTS), align=4)
        numbers = [builder.sub(each, words(_ROUNDER_BITS)) for each in bits]
        total = builder.sitofp(_reduced(builder, "add", numbers, builder.add), F32)
        for at, value in ((SCALE_AT, scale), (SUM_AT, builder.fmul(scale, total))):
            builder.store(value, pointer(builder, builder.add(out, I64(at)), F32), align=4)

    return types.void(types.int64, types.int64), codegen


@njit(**OPTIONS)
def narrow_row(x, k, out):
    for block in range(k // BLOCK):
        _narrow_block(x + block * (4 * BLOCK), out + block * BLOCK_BYTES)
