"""Products of quantised rows with packed weights, in integers: 16 weight rows at a time, one in each lane.

    sum over blocks of   scale * row's scale * (sum of products of integers)  +  lowest * row's sum

The sum of a block's products is exact; blocks are added in order, in float32. Nothing else affects a result, so it is
the same in every tile and with any number of lanes. `cpu/packed.py` describes the layout of weights, `narrow.py` that
of rows. A line is one 32-bit word of each of 16 interleaved weight rows.

Weights are unpacked to 16-bit integers, two to a lane. A processor multiplies and adds such pairs in one instruction,
or in two where it lacks VNNI.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

from llvmlite import ir

from outrider.backends.cpu.kernels.memory import F32, I16, I32, I64, Builder, declare, emit_prefetch, pointer
from outrider.backends.cpu.kernels.narrow import BLOCK_BYTES as ROW_BLOCK_BYTES
from outrider.backends.cpu.kernels.narrow import SCALE_AT, SUM_AT
from outrider.backends.cpu.kernels.tiles import Loop, register_tile, row_address
from outrider.backends.cpu.kernels.vector import (
    EIGHT_BITS,
    FOUR_BITS,
    LANE_BYTES,
    LANES,
    PAIRS_ADDED,
    ZERO,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    vector_of,
    words,
)

PACKED = (FOUR_BITS, EIGHT_BITS)
INTERLEAVED = 16
LINE_BYTES = 4 * INTERLEAVED
CACHE_LINE_BYTES = 64
LINES = {FOUR_BITS: 6, EIGHT_BITS: 9}
"""Number of lines in a block: one of scales, for four bits one of lowest values, then the integers."""
ROWS = 8
"""Number of rows of x in the largest tile."""
_SUMS_MIN = 4
"""The fewest independent sums: with fewer, a product would wait for the one before it."""
_SUMS_MAX = 8
"""The most sums that fit into registers beside their operands. With 8 lanes, the two halves of a group may take a pass
each."""
_AHEAD_BYTES = 8192
"""How far ahead weights are prefetched. With a quarter of it, 8 rows wait for memory a sixth of their time."""

_WORDS = words(0).type
_SHORTS = ir.VectorType(I16, 2 * LANES)


def _shorts(number: int) -> Builder:
    return ir.Constant(_SHORTS, [number] * (2 * LANES))


_PAIRS = {FOUR_BITS: (0, 1, 8, 9), EIGHT_BITS: (0, 1)}
"""Offsets of the row pairs that each turn over a line multiplies. With 4 bits, the second half of a block lies in the
high halves of its bytes."""


def _pair(builder: Builder, line: Builder, turn: int, item: int) -> Builder:
    """Returns the weights that one turn takes from a line, as pairs of 16-bit integers."""
    if item == EIGHT_BITS:
        return builder.ashr(line if turn else builder.shl(line, _shorts(8)), _shorts(8))
    moved = builder.lshr(line, _shorts((0, 8, 4, 12)[turn]))
    return moved if turn == 3 else builder.and_(moved, _shorts(15))


def _add_products(builder: Builder, total: Builder, weights: Builder, row: Builder) -> Builder:
    """Returns total plus the products of pairs."""
    if PAIRS_ADDED:
        name, kind = f"llvm.x86.avx512.vpdpwssd.{32 * LANES}", ir.FunctionType(_WORDS, [_WORDS] * 3)
        return builder.call(declare(builder, name, kind), [total, builder.bitcast(weights, _WORDS), row])
    name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
    multiply = declare(builder, name, ir.FunctionType(_WORDS, [_SHORTS] * 2))
    added = builder.add(total, builder.call(multiply, [weights, builder.bitcast(row, _SHORTS)]))
    # Without this barrier the compiler computes all products of one vector first and spills the operands of the next.
    return builder.asm(ir.FunctionType(_WORDS, [_WORDS]), "", "=v,0" if LANES == 16 else "=x,0", [added], True)


def _splat_word(builder: Builder, address: Builder) -> Builder:
    value = builder.load(pointer(builder, address, I32), align=4)
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def _factor(builder: Builder, address: Builder) -> Builder:
    return emit_splat(builder, builder.load(pointer(builder, address, F32), align=4))


def _emit_pass(
    builder: Builder, xs: list[Builder], weights: list[Builder], outs: list[list[Builder]], blocks: Builder, item: int
) -> None:
    """Writes the product of each row with each vector of weights, summed over all blocks, to its place in `outs`."""
    places = [place for row in outs for place in row]
    loop = Loop(builder, I64(0), blocks, 1, [ZERO] * len(places))
    results = list(loop.carried)
    x_at, w_at = builder.mul(loop.at, I64(ROW_BLOCK_BYTES)), builder.mul(loop.at, I64(LINES[item] * LINE_BYTES))
    rows = [builder.add(x, x_at) for x in xs]
    lines = [builder.add(weight, w_at) for weight in weights]
    for ahead in range(0, LINES[item] * LINE_BYTES, CACHE_LINE_BYTES):
        emit_prefetch(builder, builder.add(lines[0], I64(_AHEAD_BYTES + ahead)))
    parts = max(1, _SUMS_MIN // len(places))
    totals = [[words(0)] * parts for _ in places]
    first = 2 if item == FOUR_BITS else 1
    for number in range(first, LINES[item]):
        loaded = [
            builder.load(pointer(builder, builder.add(line, I64(number * LINE_BYTES)), _SHORTS), align=4)
            for line in lines
        ]
        for turn, place in enumerate(_PAIRS[item]):
            pairs = [_pair(builder, line, turn, item) for line in loaded]
            for row, x in enumerate(rows):
                of_row = _splat_word(builder, builder.add(x, I64(4 * (2 * (number - first) + place))))
                for vector, pair in enumerate(pairs):
                    total = totals[row * len(lines) + vector]
                    total[turn % parts] = _add_products(builder, total[turn % parts], pair, of_row)
    for vector, line in enumerate(lines):
        scale = emit_load(builder, line)
        lowest = emit_load(builder, builder.add(line, I64(LINE_BYTES))) if item == FOUR_BITS else None
        for row, x in enumerate(rows):
            at = row * len(lines) + vector
            whole = builder.sitofp(reduce(builder.add, totals[at]), vector_of())
            factor = builder.fmul(scale, _factor(builder, builder.add(x, I64(SCALE_AT))))
            results[at] = emit_fma(builder, whole, factor, results[at])
            if lowest is not None:
                results[at] = emit_fma(builder, lowest, _factor(builder, builder.add(x, I64(SUM_AT))), results[at])
    for place, result in zip(places, loop.close(results), strict=True):
        emit_store(builder, place, result)


@cache
def packed_tile(rows: int, item: int) -> Any:
    """Returns tile(x, x_stride, weights, 0, blocks, out, out_stride, 0, 0) for one group of weight rows. Strides are in
    bytes."""

    def emit(builder: Builder, args: list[Builder]) -> None:
        x, x_stride, weights, _, blocks, out, out_stride, _, _ = args
        xs = [row_address(builder, x, x_stride, row) for row in range(rows)]
        outs = [row_address(builder, out, out_stride, row) for row in range(rows)]
        halves = [I64(start) for start in range(0, LINE_BYTES, LANE_BYTES)]
        per_pass = len(halves) if rows * len(halves) <= _SUMS_MAX else 1
        for start in range(0, len(halves), per_pass):
            some = halves[start : start + per_pass]
            places = [[builder.add(out, half) for half in some] for out in outs]
            _emit_pass(builder, xs, [builder.add(weights, half) for half in some], places, blocks, item)

    return register_tile(f"packed_{rows}_{item}", emit)
