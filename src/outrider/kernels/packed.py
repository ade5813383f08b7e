"""Packed weights: blocks of 32 small whole numbers with a scale, turned into float32 in registers.

What comes out is exactly the float32 number that the block stands for, so a product with packed weights is the same
to the last bit as one with the weights written out; but only a fifth or a third of the bytes comes from memory.

    FOUR_BITS    scale, lowest, 16 bytes      scale * number + lowest
    EIGHT_BITS   scale, 32 signed bytes       scale * number

Scale and lowest are float32. Of 4-bit numbers, byte i holds number i in its low and number i + 16 in its high half.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from outrider.kernels.memory import F32, I8, I64, Builder, emit_prefetch, pointer
from outrider.kernels.tiles import Loop, line_of, register_tile, store_totals
from outrider.kernels.vector import (
    EIGHT_BITS,
    FLOAT32,
    FOUR_BITS,
    LANE_BYTES,
    LANES,
    ZERO,
    emit_fma,
    emit_load,
    emit_lookup,
    emit_splat,
    emit_store,
    vector_of,
    words,
)

PACKED = (FOUR_BITS, EIGHT_BITS)
BLOCK = 32
_AHEAD_BYTES = 256
"""How far ahead of a tile its weights are asked for."""
BLOCK_BYTES = {FOUR_BITS: 24, EIGHT_BITS: 36}
_BYTES = ir.VectorType(I8, LANES)
_WORDS = words(0).type


def _factor(builder: Builder, address: Builder) -> Builder:
    return emit_splat(builder, builder.load(pointer(builder, address, F32), align=4))


def _bytes(builder: Builder, address: Builder, at: int) -> Builder:
    return builder.load(pointer(builder, builder.add(address, I64(at)), _BYTES), align=1)


def emit_block(builder: Builder, address: Builder, item: int) -> list[Builder]:
    """The 32 numbers of a block, in order."""
    scale = _factor(builder, address)
    if item == EIGHT_BITS:
        signed = [builder.sext(_bytes(builder, address, 4 + at), _WORDS) for at in range(0, BLOCK, LANES)]
        return [builder.fmul(builder.sitofp(each, vector_of()), scale) for each in signed]
    lowest = _factor(builder, builder.add(address, I64(4)))
    both = [builder.zext(_bytes(builder, address, 8 + at), _WORDS) for at in range(0, BLOCK // 2, LANES)]
    if LANES == 16:
        # All 16 numbers that there can be, and then each by its four bits: higher ones are not looked at.
        table = emit_fma(builder, ir.Constant(vector_of(), [float(number) for number in range(16)]), scale, lowest)
        (low,) = both
        return [emit_lookup(builder, table, low), emit_lookup(builder, table, builder.lshr(low, words(4)))]
    numbers = [builder.and_(each, words(15)) for each in both] + [builder.lshr(each, words(4)) for each in both]
    return [emit_fma(builder, builder.sitofp(each, vector_of()), scale, lowest) for each in numbers]


@cache
def packed_tile(rows: int, columns: int, item: int, *, spread: bool = False) -> Any:
    """As `dot_tile`; the length is a whole number of blocks."""

    def emit(builder: Builder, args: list[Builder]) -> None:
        x, x_stride, weights, weight_stride, length, out, out_stride, _, step = args
        xs = [line_of(builder, x, x_stride, row) for row in range(rows)]
        ws = [line_of(builder, weights, weight_stride, column) for column in range(columns)]
        loop = Loop(builder, I64(0), builder.sdiv(length, I64(BLOCK)), 1, [ZERO] * (rows * columns))
        x_at = builder.mul(loop.at, I64(4 * BLOCK))
        w_at = builder.mul(loop.at, I64(BLOCK_BYTES[item]))
        sums = list(loop.carried)
        for column, weight in enumerate(ws):
            emit_prefetch(builder, builder.add(weight, builder.add(w_at, I64(_AHEAD_BYTES))))
            for number, value in enumerate(emit_block(builder, builder.add(weight, w_at), item)):
                for row, each in enumerate(xs):
                    at = builder.add(builder.add(each, x_at), I64(number * LANE_BYTES))
                    place = row * columns + column
                    sums[place] = emit_fma(builder, emit_load(builder, at, FLOAT32), value, sums[place])
        finals = loop.close(sums)
        for row in range(rows):
            sums_of_row = finals[row * columns : (row + 1) * columns]
            store_totals(builder, line_of(builder, out, out_stride, row), sums_of_row, step if spread else None)

    return register_tile(f"packed_{rows}x{columns}_{item}_{spread:d}", emit)


@cache
def block_unpacker(item: int) -> Any:
    """unpack(block, out): 32 float32 numbers."""

    @intrinsic
    def unpack(typingctx, block, out):
        def codegen(context, builder, signature, args):
            for number, value in enumerate(emit_block(builder, args[0], item)):
                emit_store(builder, builder.add(args[1], I64(number * LANE_BYTES)), value)

        return types.void(types.int64, types.int64), codegen

    return unpack
