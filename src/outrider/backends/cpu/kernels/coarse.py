"""Products of 8-bit rows with coarse weights, for drafters, whose tokens the target verifies.

    scale * row's scale * (sum of products of integers)

Weights have 7 bits, stored with an offset of 64 so that they are not negative; rows have 8 bits with a sign. Both have
one scale for a whole row, so nothing but integers is added up along it, and a product is the same in every tile and on
every processor. Four products and their sum take one instruction, or three where the processor lacks VNNI: with 7 bits,
two products fit into 16 bits. `cpu/packed.py` describes the layout of weights.

    8 bytes, then one for each element     the row's scale, the offset times the sum of its integers, the integers
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from outrider.backends.cpu.kernels.memory import F32, I8, I32, I64, Builder, declare, emit_prefetch, pointer
from outrider.backends.cpu.kernels.tiles import Loop, register_tile, row_address
from outrider.backends.cpu.kernels.vector import (
    COARSE,
    LANE_BYTES,
    LANES,
    PAIRS_ADDED,
    ROUNDER,
    constant,
    emit_fma,
    emit_load,
    emit_splat,
    emit_store,
    vector_of,
    words,
)

OFFSET = 64
"""What is added to a weight to store it."""
HEAD_BYTES = 8
_SUM_AT = 4
_BLOCK = 32
_LINE_BYTES = 64
_BLOCK_LINES = _BLOCK // 4
_SUMS = 8
"""The sums that keep a processor busy, and the most that fit into 16 registers beside their operands."""
_AHEAD_BYTES = 8192
_LARGEST = 127.0
_NOTHING = 2.0**-100
"""A row whose largest magnitude is below this becomes zeros: the inverse of its scale would be infinite."""
_ROUNDER_BITS = 0x4B400000  # the bits of ROUNDER

_WORDS = words(0).type
_BYTES = ir.VectorType(I8, LANES)
_FOURS = ir.VectorType(I8, 4 * LANES)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)


def row_bytes(k: int) -> int:
    return HEAD_BYTES + k


def _splat_word(builder: Builder, address: Builder) -> Builder:
    value = builder.load(pointer(builder, address, I32), align=4)
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def _add_products(builder: Builder, total: Builder, weights: Builder, row: Builder) -> Builder:
    """Returns total plus the sums of four products in each lane."""
    if PAIRS_ADDED:
        name, kind = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", ir.FunctionType(_WORDS, [_WORDS] * 3)
        return builder.call(declare(builder, name, kind), [total, weights, row])
    wide = LANES == 16
    name = "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw"
    multiply = declare(builder, name, ir.FunctionType(_SHORTS, [_FOURS] * 2))
    pairs = builder.call(multiply, [builder.bitcast(weights, _FOURS), builder.bitcast(row, _FOURS)])
    name = "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd"
    add_pairs = declare(builder, name, ir.FunctionType(_WORDS, [_SHORTS] * 2))
    added = builder.add(total, builder.call(add_pairs, [pairs, ir.Constant(_SHORTS, [1] * (2 * LANES))]))
    # Without this barrier the compiler computes all products of one vector first and spills the operands of the next.
    return builder.asm(ir.FunctionType(_WORDS, [_WORDS]), "", "=v,0" if wide else "=x,0", [added], True)


def _emit_pass(
    builder: Builder, xs: list[Builder], weights: list[Builder], outs: list[list[Builder]], blocks: Builder
) -> None:
    """Writes the product of each row with each vector of weights to its place in `outs`."""
    vectors = len(weights)
    parts = max(1, _SUMS // (len(xs) * vectors))
    loop = Loop(builder, I64(0), blocks, 1, [words(0)] * (len(xs) * vectors * parts))
    x_at = builder.add(builder.mul(loop.at, I64(_BLOCK)), I64(HEAD_BYTES))
    w_at = builder.add(builder.mul(loop.at, I64(_BLOCK_LINES * _LINE_BYTES)), I64(_LINE_BYTES))
    rows = [builder.add(x, x_at) for x in xs]
    lines = [builder.add(weight, w_at) for weight in weights]
    sums = list(loop.carried)
    for number in range(_BLOCK_LINES):
        emit_prefetch(builder, builder.add(lines[0], I64(_AHEAD_BYTES + number * _LINE_BYTES)))
        loaded = [
            builder.load(pointer(builder, builder.add(line, I64(number * _LINE_BYTES)), _WORDS), align=4)
            for line in lines
        ]
        for row, x in enumerate(rows):
            of_row = _splat_word(builder, builder.add(x, I64(4 * number)))
            for vector, line in enumerate(loaded):
                at = (row * vectors + vector) * parts + number % parts
                sums[at] = _add_products(builder, sums[at], line, of_row)
    sums = loop.close(sums)
    for row, x in enumerate(xs):
        row_scale = emit_splat(builder, builder.load(pointer(builder, x, F32), align=4))
        offset = _splat_word(builder, builder.add(x, I64(_SUM_AT)))
        for vector, weight in enumerate(weights):
            at = (row * vectors + vector) * parts
            whole = builder.sub(reduce(builder.add, sums[at : at + parts]), offset)
            factor = builder.fmul(emit_load(builder, weight), row_scale)
            emit_store(builder, outs[row][vector], builder.fmul(builder.sitofp(whole, vector_of()), factor))


@cache
def coarse_tile(rows: int) -> Any:
    """Returns tile(x, x_stride, weights, 0, blocks, out, out_stride, 0, 0) for one group of weight rows. Strides are in
    bytes."""

    def emit(builder: Builder, args: list[Builder]) -> None:
        x, x_stride, weights, _, blocks, out, out_stride, _, _ = args
        xs = [row_address(builder, x, x_stride, row) for row in range(rows)]
        outs = [row_address(builder, out, out_stride, row) for row in range(rows)]
        halves = [I64(start) for start in range(0, _LINE_BYTES, LANE_BYTES)]
        per_pass = len(halves) if rows * len(halves) <= _SUMS else 1
        for start in range(0, len(halves), per_pass):
            some = halves[start : start + per_pass]
            places = [[builder.add(out, half) for half in some] for out in outs]
            _emit_pass(builder, xs, [builder.add(weights, half) for half in some], places, blocks)

    return register_tile(f"coarse_{rows}_{COARSE}", emit)


@intrinsic
def narrow_row_coarsely(typingctx, x, k, out):
    """Quantises a row to 8 bits. Its length is a multiple of 32."""

    def codegen(context, builder, signature, args):
        x, k, out = args
        loop = Loop(builder, I64(0), k, LANES, [words(0)])
        value = emit_load(builder, builder.add(x, builder.mul(loop.at, I64(4))))
        # Compared as bits, so that NaN is larger than any number and becomes the scale.
        size = builder.and_(builder.bitcast(value, _WORDS), words(0x7FFFFFFF))
        most = loop.carried[0]
        (sizes,) = loop.close([builder.select(builder.icmp_signed(">", size, most), size, most)])
        largest = builder.bitcast(_reduced(builder, "smax", sizes), F32)
        nothing = builder.fcmp_ordered("<", largest, F32(_NOTHING))
        inverse = builder.select(nothing, F32(0.0), builder.fdiv(F32(_LARGEST), largest))
        scale = builder.select(nothing, F32(0.0), builder.fmul(largest, F32(1.0 / _LARGEST)))
        factor = emit_splat(builder, inverse)
        loop = Loop(builder, I64(0), k, LANES, [words(0)])
        value = emit_load(builder, builder.add(x, builder.mul(loop.at, I64(4))))
        bits = builder.bitcast(emit_fma(builder, value, factor, constant(ROUNDER)), _WORDS)
        at = builder.add(builder.add(out, I64(HEAD_BYTES)), loop.at)
        builder.store(builder.trunc(bits, _BYTES), pointer(builder, at, _BYTES), align=1)
        (totals,) = loop.close([builder.add(loop.carried[0], builder.sub(bits, words(_ROUNDER_BITS)))])
        total = builder.mul(_reduced(builder, "add", totals), I32(OFFSET))
        builder.store(scale, pointer(builder, out, F32), align=4)
        builder.store(total, pointer(builder, builder.add(out, I64(_SUM_AT)), I32), align=4)

    return types.void(types.int64, types.int64, types.int64), codegen


def _reduced(builder: Builder, operation: str, vector: Builder) -> Builder:
    kind = ir.FunctionType(I32, [_WORDS])
    return builder.call(declare(builder, f"llvm.vector.reduce.{operation}.v{LANES}i32", kind), [vector])
