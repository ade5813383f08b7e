"""Products of narrowed rows with packed weights, in whole numbers: 16 weight rows at a time, one in each lane.

    sum over blocks of   scale * row's scale * (sum of products of whole numbers)  +  lowest * row's sum

The sum of a block's products is exact; blocks are added in order, in float32. Nothing else touches a result, so it is
the same in every tile and with any number of lanes. How weights lie: models/packed.py; how rows do: narrow.py.

Weights are taken apart into numbers of 16 bits, two to a lane, and a processor multiplies and adds such pairs in one
instruction, or in two where it lacks VNNI.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from outrider.kernels.memory import F32, I16, I32, I64, Builder, declare, emit_prefetch, pointer
from outrider.kernels.narrow import BLOCK_BYTES as ROW_BLOCK_BYTES
from outrider.kernels.narrow import SCALE_AT, SUM_AT
from outrider.kernels.tiles import Loop, line_of, register_tile
from outrider.kernels.vector import (
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
BLOCK = 32
WOVEN = 16
LINE_BYTES = 4 * WOVEN
LINES = {FOUR_BITS: 6, EIGHT_BITS: 9}
"""Of 16 words, of a block of woven rows: scales, lowest, numbers."""
ROWS = 8
"""Of the largest tile."""
_GROUPS = (4, 2, 2, 1, 1, 1, 1, 1) if LANES == 16 else (2, 1, 1, 1, 1, 1, 1, 1)
"""Of 16 weight rows, of a tile, by its rows of x: sums enough that none waits for the one before."""
_VECTORS_MAX = 8 if LANES == 16 else 6
"""Of sums in a tile that go together; where a group has more, its halves are taken one after the other."""
_AHEAD_BYTES = 1024

_WORDS = words(0).type
_SHORTS = ir.VectorType(I16, 2 * LANES)


def groups_of(rows: int) -> int:
    return _GROUPS[rows - 1]


def _shorts(number: int) -> Builder:
    return ir.Constant(_SHORTS, [number] * (2 * LANES))


def _numbers(builder: Builder, line: Builder, item: int) -> list[tuple[int, Builder]]:
    """Weights of a line as pairs of 16 bits, each with the place among the row's pairs that belongs to it."""
    raw = builder.load(pointer(builder, line, _SHORTS), align=4)
    if item == EIGHT_BITS:
        even = builder.ashr(builder.shl(raw, _shorts(8)), _shorts(8))
        return [(0, even), (1, builder.ashr(raw, _shorts(8)))]
    low = [builder.and_(raw, _shorts(15)), builder.and_(builder.lshr(raw, _shorts(8)), _shorts(15))]
    high = [builder.and_(builder.lshr(raw, _shorts(4)), _shorts(15)), builder.lshr(raw, _shorts(12))]
    # The second half of a block lies in the high halves of its bytes.
    return [*enumerate(low), *enumerate(high, 8)]


def _add_products(builder: Builder, total: Builder, weights: Builder, row: Builder) -> Builder:
    """total + products of pairs."""
    if PAIRS_ADDED:
        name, kind = f"llvm.x86.avx512.vpdpwssd.{32 * LANES}", ir.FunctionType(_WORDS, [_WORDS] * 3)
        return builder.call(declare(builder, name, kind), [total, builder.bitcast(weights, _WORDS), row])
    name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
    multiply = declare(builder, name, ir.FunctionType(_WORDS, [_SHORTS] * 2))
    return builder.add(total, builder.call(multiply, [weights, builder.bitcast(row, _SHORTS)]))


def _splat_word(builder: Builder, address: Builder) -> Builder:
    value = builder.load(pointer(builder, address, I32), align=4)
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def _factor(builder: Builder, address: Builder) -> Builder:
    return emit_splat(builder, builder.load(pointer(builder, address, F32), align=4))


def _emit_pass(
    builder: Builder, xs: list[Builder], weights: list[Builder], outs: list[list[Builder]], blocks: Builder, item: int
) -> None:
    """Over all blocks: sums of each row with each vector of weights, to where they belong."""
    loop = Loop(builder, I64(0), blocks, 1, [ZERO] * (len(xs) * len(weights)))
    x_at, w_at = builder.mul(loop.at, I64(ROW_BLOCK_BYTES)), builder.mul(loop.at, I64(LINES[item] * LINE_BYTES))
    rows = [builder.add(x, x_at) for x in xs]
    lines = [builder.add(weight, w_at) for weight in weights]
    first_line = 2 if item == FOUR_BITS else 1
    totals = [words(0)] * len(loop.carried)
    for number in range(first_line, LINES[item]):
        pair_at = 2 * (number - first_line)
        for vector, line in enumerate(lines):
            for place, pairs in _numbers(builder, builder.add(line, I64(number * LINE_BYTES)), item):
                for row, x in enumerate(rows):
                    at = row * len(lines) + vector
                    pair = _splat_word(builder, builder.add(x, I64(4 * (pair_at + place))))
                    totals[at] = _add_products(builder, totals[at], pairs, pair)
    sums = list(loop.carried)
    for vector, line in enumerate(lines):
        for ahead in range(0, LINES[item] * LINE_BYTES, 64):
            if LANES == 16 or vector % 2 == 0:
                emit_prefetch(builder, builder.add(line, I64(_AHEAD_BYTES + ahead)))
        scale = emit_load(builder, line)
        lowest = emit_load(builder, builder.add(line, I64(LINE_BYTES))) if item == FOUR_BITS else None
        for row, x in enumerate(rows):
            at = row * len(lines) + vector
            factor = builder.fmul(scale, _factor(builder, builder.add(x, I64(SCALE_AT))))
            sums[at] = emit_fma(builder, builder.sitofp(totals[at], vector_of()), factor, sums[at])
            if lowest is not None:
                sums[at] = emit_fma(builder, lowest, _factor(builder, builder.add(x, I64(SUM_AT))), sums[at])
    for at, value in enumerate(loop.close(sums)):
        emit_store(builder, outs[at // len(lines)][at % len(lines)], value)


@cache
def packed_tile(rows: int, groups: int, item: int) -> Any:
    """tile(x, x_stride, weights, group_stride, blocks, out, out_stride, 0, 0); strides in bytes."""

    def emit(builder: Builder, args: list[Builder]) -> None:
        x, x_stride, weights, group_stride, blocks, out, out_stride, _, _ = args
        xs = [line_of(builder, x, x_stride, row) for row in range(rows)]
        halves = WOVEN // LANES
        vectors = [
            (
                builder.add(line_of(builder, weights, group_stride, group), I64(half * LANE_BYTES)),
                [
                    builder.add(line_of(builder, out, out_stride, row), I64(group * LINE_BYTES + half * LANE_BYTES))
                    for row in range(rows)
                ],
            )
            for group in range(groups)
            for half in range(halves)
        ]
        together = len(vectors) if rows * len(vectors) <= _VECTORS_MAX else 1
        for start in range(0, len(vectors), together):
            some = vectors[start : start + together]
            outs = [[places[row] for _, places in some] for row in range(rows)]
            _emit_pass(builder, xs, [weight for weight, _ in some], outs, blocks, item)

    return register_tile(f"packed_{rows}x{groups}_{item}", emit)
