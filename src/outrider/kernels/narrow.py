"""Rows of float32 to rows of whole numbers of 16 bits, as products with packed weights take them.

A block of 32 gets a scale of its own, its largest number over 32767, so what is lost is at most a 65534th of that.
Sums of products of whole numbers are exact in any order; what follows has a lane for each weight row. So a product is
the same whatever stands beside a row, and on every processor.

    72 bytes a block: 32 numbers, their scale, scale times their sum

Of four numbers the second and third change places: so 16 bits of weights that lie a byte apart meet their own.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from outrider.kernels.compiling import OPTIONS
from outrider.kernels.memory import F32, I32, I64, Builder, declare, pointer
from outrider.kernels.vector import LANE_BYTES, LANES, ROUNDER, constant, emit_fma, emit_load, emit_splat, words

BLOCK = 32
BLOCK_BYTES = 72
SCALE_AT, SUM_AT = 64, 68

_LARGEST = 32767.0
_NOTHING = 2.0**-100
"""Below it a block counts as zeros: the inverse of its scale would be infinite."""
_ROUNDER_BITS = 0x4B400000  # ROUNDER's own
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
        # Compared as bits: what is not a number is the largest of all, and so becomes the scale.
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
