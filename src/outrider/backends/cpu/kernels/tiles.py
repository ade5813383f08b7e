"""The two inner loops, each over a tile whose accumulators stay in registers.

`dot_tile`: dot products of a few rows with a few weight rows (or of queries with keys).
`mix_tile`: weighted sums of value rows for a few heads.

The row-exactness of the backend rests on these two. A dot product has one vector accumulator, updated in order along
the row, and then one fixed tree over its lanes; a weighted sum takes its rows in order. Neither depends on the tile
that it is computed in.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from outrider.backends.cpu.kernels.memory import F32, I64, Builder, emit_prefetch, pointer
from outrider.backends.cpu.kernels.vector import (
    FLOAT32,
    ITEM_BYTES,
    LANE_BYTES,
    LANES,
    ZERO,
    emit_fma,
    emit_load,
    emit_mask,
    emit_splat,
    emit_store,
    emit_totals,
)

ROWS, COLUMNS = (6, 4) if LANES == 16 else (4, 3)
"""Size of a full tile. Its accumulators, its weights and a row must fit into 32 registers, or 16 with 8 lanes."""
COLUMNS_OF_ONE, COLUMNS_OF_TWO = (8, 8) if LANES == 16 else (6, 4)
"""Number of columns in tiles of one row and of two rows."""


class Loop:
    """Emits `for at in range(first, stop, step)` with loop-carried values. `close` takes their next values and returns
    their last ones."""

    def __init__(self, builder: Builder, first: Builder, stop: Builder, step: int, carried: list[Builder]) -> None:
        self._builder, self._stop, self._step = builder, stop, step
        before, self._body = builder.block, builder.append_basic_block("loop")
        self._after = builder.append_basic_block("after")
        self._first, self._before, self._carried_in = first, before, carried
        builder.cbranch(builder.icmp_signed("<", first, stop), self._body, self._after)
        builder.position_at_end(self._body)
        self.at = builder.phi(I64)
        self.at.add_incoming(first, before)
        self.carried = []
        for value in carried:
            phi = builder.phi(value.type)
            phi.add_incoming(value, before)
            self.carried.append(phi)

    def close(self, carried: list[Builder]) -> list[Builder]:
        builder, end = self._builder, self._builder.block
        following = builder.add(self.at, I64(self._step))
        self.at.add_incoming(following, end)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, end)
        builder.cbranch(builder.icmp_signed("<", following, self._stop), self._body, self._after)
        builder.position_at_end(self._after)
        results = []
        for value_in, value in zip(self._carried_in, carried, strict=True):
            phi = builder.phi(value.type)
            phi.add_incoming(value_in, self._before)
            phi.add_incoming(value, end)
            results.append(phi)
        return results


def row_address(builder: Builder, base: Builder, stride: Builder, count: int) -> Builder:
    return base if count == 0 else builder.add(base, builder.mul(stride, I64(count)))


def _multiply(
    builder: Builder, xs: list[Builder], weights: list[Builder], sums: list[Builder], item: int, mask: Builder
) -> list[Builder]:
    """Advances every accumulator by one step. Weights are held in registers while rows are loaded one at a time."""
    loaded = [emit_load(builder, weight, item, mask) for weight in weights]
    out = list(sums)
    for row, x in enumerate(xs):
        value = emit_load(builder, x, FLOAT32, mask)
        for column, weight in enumerate(loaded):
            place = row * len(weights) + column
            out[place] = emit_fma(builder, value, weight, out[place])
    return out


@cache
def dot_tile(
    rows: int,
    columns: int,
    item: int = FLOAT32,
    *,
    listed: bool = False,
    ahead: bool = False,
    spread: bool = False,
) -> Any:
    """Returns tile(x, x_stride, weights, weight_stride, length, out, out_stride, extra, step). Strides are in bytes.

    `listed`: `weights` is the address of a list of row addresses. `ahead`: the tile prefetches memory from `extra` on,
    a cache line for each weight vector that it uses, `step` bytes apart. `spread`: the results of a row are `step`
    bytes apart instead of contiguous.
    """

    def emit(builder: Builder, args: list[Builder]) -> None:
        x, x_stride, weights, weight_stride, length, out, out_stride, extra, step = args
        xs = [row_address(builder, x, x_stride, row) for row in range(rows)]
        if listed:
            base = pointer(builder, weights, I64)
            ws = [builder.load(builder.gep(base, [I64(column)], source_etype=I64)) for column in range(columns)]
        else:
            ws = [row_address(builder, weights, weight_stride, column) for column in range(columns)]

        full = builder.and_(length, I64(-LANES))
        loop = Loop(builder, I64(0), full, LANES, [ZERO] * (rows * columns))
        x_at, w_at = builder.mul(loop.at, I64(4)), builder.mul(loop.at, I64(ITEM_BYTES[item]))
        if ahead:
            steps = builder.mul(builder.lshr(loop.at, I64(LANES.bit_length() - 1)), I64(columns))
            here = builder.add(extra, builder.mul(steps, step))
            for column in range(columns):
                emit_prefetch(builder, row_address(builder, here, step, column))
        sums = loop.close(
            _multiply(
                builder,
                [builder.add(each, x_at) for each in xs],
                [builder.add(each, w_at) for each in ws],
                loop.carried,
                item,
                None,
            )
        )
        rest = builder.sub(length, full)
        with_rest, done = builder.append_basic_block("rest"), builder.append_basic_block("done")
        before = builder.block
        builder.cbranch(builder.icmp_signed(">", rest, I64(0)), with_rest, done)
        builder.position_at_end(with_rest)
        x_at, w_at = builder.mul(full, I64(4)), builder.mul(full, I64(ITEM_BYTES[item]))
        with_sums = _multiply(
            builder,
            [builder.add(each, x_at) for each in xs],
            [builder.add(each, w_at) for each in ws],
            sums,
            item,
            emit_mask(builder, rest),
        )
        after_rest = builder.block
        builder.branch(done)
        builder.position_at_end(done)
        finals = []
        for without, with_it in zip(sums, with_sums, strict=True):
            phi = builder.phi(without.type)
            phi.add_incoming(without, before)
            phi.add_incoming(with_it, after_rest)
            finals.append(phi)
        for row in range(rows):
            sums_of_row = finals[row * columns : (row + 1) * columns]
            store_totals(builder, row_address(builder, out, out_stride, row), sums_of_row, step if spread else None)

    return register_tile(f"dot_{rows}x{columns}_{item}_{listed:d}{ahead:d}{spread:d}", emit)


def store_totals(builder: Builder, address: Builder, vectors: list[Builder], step: Builder) -> None:
    """Stores the total of each vector: contiguously, or `step` bytes apart."""
    at = 0
    while at < len(vectors):
        count = next(size for size in (4, 2, 1) if size <= len(vectors) - at)
        totals = emit_totals(builder, vectors[at : at + count])
        if count == 1 or step is None:
            place = builder.add(address, I64(4 * at)) if step is None else row_address(builder, address, step, at)
            builder.store(totals, pointer(builder, place, totals.type), align=4)
        else:
            for each in range(count):
                place = row_address(builder, address, step, at + each)
                builder.store(builder.extract_element(totals, I64(each)), pointer(builder, place, F32), align=4)
        at += count


@cache
def mix_tile(heads: int, vectors: int, item: int = FLOAT32, *, partial: bool = False) -> Any:
    """Returns tile(weights, weight_stride, rows, offset, count, out, out_stride, lanes, 0).

    out[head] = sum over t < count of weights[head][t] * row t, for `vectors` vectors from byte `offset` of each row on.
    `rows` is the address of a list of row addresses. `partial`: the last vector has only `lanes` lanes.
    """

    def emit(builder: Builder, args: list[Builder]) -> None:
        weights, weight_stride, rows, offset, count, out, out_stride, lanes, _ = args
        mask = emit_mask(builder, lanes) if partial else None
        weight_rows = [row_address(builder, weights, weight_stride, head) for head in range(heads)]
        loop = Loop(builder, I64(0), count, 1, [ZERO] * (heads * vectors))
        listed = builder.gep(pointer(builder, rows, I64), [loop.at], source_etype=I64)
        address = builder.add(builder.load(listed), offset)
        factors = []
        for weight_row in weight_rows:
            place = builder.gep(pointer(builder, weight_row, F32), [loop.at], source_etype=F32)
            factors.append(emit_splat(builder, builder.load(place)))
        sums = list(loop.carried)
        for number in range(vectors):
            at = builder.add(address, I64(number * LANES * ITEM_BYTES[item]))
            value = emit_load(builder, at, item, mask if number == vectors - 1 else None)
            for head, factor in enumerate(factors):
                place = head * vectors + number
                sums[place] = emit_fma(builder, factor, value, sums[place])
        sums = loop.close(sums)
        for head in range(heads):
            out_row = row_address(builder, out, out_stride, head)
            for number in range(vectors):
                emit_store(builder, builder.add(out_row, I64(number * LANE_BYTES)), sums[head * vectors + number])

    return register_tile(f"mix_{heads}x{vectors}_{item}_{partial:d}", emit)


def register_tile(name: str, emit: Any) -> Any:
    """Returns an intrinsic that calls a tile. The tile is a function that is never inlined, since its accumulators
    would not all get registers beside the variables of a caller."""

    @intrinsic
    def tile(typingctx, a, b, c, d, e, f, g, h, i):
        def codegen(context, builder, signature, args):
            function = builder.module.globals.get(name)
            if function is None:
                kind = ir.FunctionType(ir.VoidType(), [I64] * 9)
                function = ir.Function(builder.module, kind, name)
                function.linkage = "internal"
                function.attributes.add("noinline")
                inside = ir.IRBuilder(function.append_basic_block("entry"))
                emit(inside, list(function.args))
                inside.ret_void()
            builder.call(function, args)

        return types.void(*([types.int64] * 9)), codegen

    return tile
