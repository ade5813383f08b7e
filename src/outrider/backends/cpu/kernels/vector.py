"""Vectors of float32 as values in compiled code.

Loops over vectors are written out instead of left to the compiler's vectoriser. That fixes the order of every sum, so
a row's result is the same whatever else is in the batch.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.registry import cpu_target
from numba.extending import intrinsic, register_model

from outrider.backends.cpu.kernels.memory import F32, I16, I32, Builder, declare, pointer

_FEATURES = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
LANES: int = 16 if {"+avx512f", "+avx512bw", "+avx512vl", "+avx512dq"} <= _FEATURES else 8
LANE_BYTES = 4 * LANES
PAIRS_ADDED: bool = ("+avx512vnni" if LANES == 16 else "+avxvnni") in _FEATURES
"""Whether one instruction (VNNI) multiplies pairs of 16-bit integers and adds them to a sum."""
FAST_HERE: bool = {"+avx2", "+fma", "+f16c"} <= _FEATURES

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""Element types in memory. In registers all elements are float32."""
FOUR_BITS, EIGHT_BITS, COARSE = 3, 4, 5
"""Element types of packed weights: see packed.py and coarse.py."""
ITEM_BYTES = (4, 2, 2)

_VECTOR = ir.VectorType(F32, LANES)
_WORDS = ir.VectorType(I32, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
_SHORTS = ir.VectorType(I16, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)


class Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"Vector{LANES}")


vector = Vector()


@register_model(Vector)
class _VectorModel(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _VECTOR)


# --- functions from IR values to IR values, for tiles and intrinsics ----------------------------------------


def constant(value: float) -> Builder:
    return ir.Constant(_VECTOR, [value] * LANES)


def vector_of() -> Any:
    """Returns the type of a vector of float32."""
    return _VECTOR


def words(value: int) -> Builder:
    return ir.Constant(_WORDS, [value] * LANES)


ZERO = constant(0.0)


def emit_splat(builder: Builder, scalar: Builder) -> Builder:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def emit_mask(builder: Builder, count: Builder) -> Builder:
    """Returns the mask of the first `count` lanes."""
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), builder.trunc(count, I32), I32(0))
    counts = builder.shuffle_vector(first, ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(_WORDS, list(range(LANES))), counts)


def _memory_type(item: int) -> tuple[Any, str]:
    return ((_VECTOR, f"v{LANES}f32"), (_SHORTS, f"v{LANES}i16"), (_HALVES, f"v{LANES}f16"))[item]


def emit_load(builder: Builder, address: Builder, item: int = FLOAT32, mask: Builder = None) -> Builder:
    """Returns LANES elements as float32. Lanes outside the mask are zero, and their memory is not read."""
    kind, suffix = _memory_type(item)
    if mask is None:
        raw = builder.load(pointer(builder, address, kind), align=ITEM_BYTES[item])
    else:
        signature = ir.FunctionType(kind, [kind.as_pointer(), I32, _MASK, kind])
        load = declare(builder, f"llvm.masked.load.{suffix}.p0", signature)
        nothing = ir.Constant(kind, [0.0 if item != BFLOAT16 else 0] * LANES)
        raw = builder.call(load, [pointer(builder, address, kind), I32(ITEM_BYTES[item]), mask, nothing])
    if item == FLOAT32:
        return raw
    if item == FLOAT16:
        return builder.fpext(raw, _VECTOR)
    return builder.bitcast(builder.shl(builder.zext(raw, _WORDS), words(16)), _VECTOR)


def emit_store(builder: Builder, address: Builder, value: Builder, item: int = FLOAT32, mask: Builder = None) -> None:
    kind, suffix = _memory_type(item)
    if item == FLOAT16:
        value = builder.fptrunc(value, _HALVES)
    elif item == BFLOAT16:
        value = _round_to_bfloat16(builder, value)
    if mask is None:
        builder.store(value, pointer(builder, address, kind), align=ITEM_BYTES[item])
        return
    signature = ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), I32, _MASK])
    store = declare(builder, f"llvm.masked.store.{suffix}.p0", signature)
    builder.call(store, [value, pointer(builder, address, kind), I32(ITEM_BYTES[item]), mask])


def _round_to_bfloat16(builder: Builder, value: Builder) -> Builder:
    """Rounds to nearest, ties to even. NaN stays NaN."""
    bits = builder.bitcast(value, _WORDS)
    odd = builder.and_(builder.lshr(bits, words(16)), words(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, words(0x7FFF))), words(16))
    rounded = builder.select(builder.fcmp_unordered("uno", value, value), words(0x7FC0), rounded)
    return builder.trunc(rounded, _SHORTS)


def emit_fma(builder: Builder, a: Builder, b: Builder, c: Builder) -> Builder:
    fma = declare(builder, f"llvm.fma.v{LANES}f32", ir.FunctionType(_VECTOR, [_VECTOR] * 3))
    return builder.call(fma, [a, b, c])


def _pick(builder: Builder, a: Builder, b: Builder, lanes: list[int]) -> Builder:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def emit_totals(builder: Builder, vectors: list[Builder]) -> Builder:
    """Returns the sum of each of 1, 2 or 4 vectors: a scalar, or a vector of 2 or 4.

    Halves are added to halves down to one lane, in the same pairs for any number of vectors.
    """
    width = LANES  # number of lanes that belong to one sum
    parts = vectors
    while len(parts) > 1:
        half = width // 2
        joined = []
        for a, b in zip(parts[::2], parts[1::2], strict=True):
            low = [lane for lane in range(2 * LANES) if lane % width < half]
            high = [lane + half for lane in low]
            joined.append(builder.fadd(_pick(builder, a, b, low), _pick(builder, a, b, high)))
        parts, width = joined, half
    total = parts[0]
    while width > 1:
        half = width // 2
        moved = [lane + half if lane % width < half else lane for lane in range(LANES)]
        total = builder.fadd(total, _pick(builder, total, total, moved))
        width = half
    if len(vectors) == 1:
        return builder.extract_element(total, I32(0))
    step = LANES // len(vectors)
    return _pick(builder, total, total, list(range(0, LANES, step)))


def emit_largest(builder: Builder, value: Builder) -> Builder:
    width = LANES
    while width > 1:
        width //= 2
        moved = _pick(builder, value, value, [(lane + width) % LANES for lane in range(LANES)])
        value = builder.select(builder.fcmp_ordered(">", value, moved), value, moved)
    return builder.extract_element(value, I32(0))


_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
ROUNDER = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LOWEST, _EXP_HIGHEST = -87.0, 88.0


def emit_exp(builder: Builder, x: Builder) -> Builder:
    """Returns e**x to about 1e-7 by Cephes' polynomial: 0 below -87, and e**88 above 88."""
    lowest, highest = constant(_EXP_LOWEST), constant(_EXP_HIGHEST)
    inside = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    inside = builder.select(builder.fcmp_ordered(">", inside, highest), highest, inside)
    shifted = emit_fma(builder, inside, constant(_LOG2_E), constant(ROUNDER))
    whole = builder.fsub(shifted, constant(ROUNDER))
    rest = emit_fma(builder, whole, constant(-_LN2_HIGH), inside)
    rest = emit_fma(builder, whole, constant(-_LN2_LOW), rest)
    result = constant(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        result = emit_fma(builder, result, rest, constant(term))
    result = emit_fma(builder, result, builder.fmul(rest, rest), builder.fadd(rest, constant(1.0)))
    power = builder.shl(builder.bitcast(shifted, _WORDS), words(23))
    scaled = builder.bitcast(builder.add(builder.bitcast(result, _WORDS), power), _VECTOR)
    return builder.select(builder.fcmp_ordered("<", x, lowest), ZERO, scaled)


# --- intrinsics for Numba functions ------------------------------------------------------------------------


def loader(item: int) -> Any:
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            return emit_load(builder, args[0], item)

        return vector(types.int64), codegen

    return load


def part_loader(item: int) -> Any:
    """Returns load(address, count), which leaves the lanes from `count` on zero."""

    @intrinsic
    def load_part(typingctx, address, count):
        def codegen(context, builder, signature, args):
            return emit_load(builder, args[0], item, emit_mask(builder, args[1]))

        return vector(types.int64, types.int64), codegen

    return load_part


def part_storer(item: int) -> Any:
    """Returns store(address, vector, count), which writes the first `count` lanes."""

    @intrinsic
    def store_part(typingctx, address, value, count):
        def codegen(context, builder, signature, args):
            emit_store(builder, args[0], args[1], item, emit_mask(builder, args[2]))

        return types.void(types.int64, vector, types.int64), codegen

    return store_part


load, load_part, store_part = loader(FLOAT32), part_loader(FLOAT32), part_storer(FLOAT32)


@intrinsic
def store(typingctx, address, value):
    def codegen(context, builder, signature, args):
        emit_store(builder, args[0], args[1])

    return types.void(types.int64, vector), codegen


@intrinsic
def splat(typingctx, value):
    def codegen(context, builder, signature, args):
        return emit_splat(builder, args[0])

    return vector(types.float32), codegen


def _elementwise(arity: int, emit: Any) -> Any:
    signature_of_it = vector(*([vector] * arity))

    def codegen(context, builder, signature, args):
        return emit(builder, *args)

    # Numba requires an intrinsic's arguments to be named.
    def one(typingctx, a):
        return signature_of_it, codegen

    def two(typingctx, a, b):
        return signature_of_it, codegen

    def three(typingctx, a, b, c):
        return signature_of_it, codegen

    def four(typingctx, a, b, c, d):
        return signature_of_it, codegen

    return intrinsic((one, two, three, four)[arity - 1])


def _bits(operation: str, sign: bool) -> Any:
    """Returns a bitwise operation with a mask of the sign bit, or of all other bits."""
    mask = words(-0x80000000 if sign else 0x7FFFFFFF)

    def emit(builder: Builder, value: Builder) -> Builder:
        return getattr(builder, operation)(builder.bitcast(value, _WORDS), mask)

    return emit


_sign, _size = _bits("and_", True), _bits("and_", False)

add = _elementwise(2, lambda builder, a, b: builder.fadd(a, b))
sub = _elementwise(2, lambda builder, a, b: builder.fsub(a, b))
mul = _elementwise(2, lambda builder, a, b: builder.fmul(a, b))
div = _elementwise(2, lambda builder, a, b: builder.fdiv(a, b))
fma = _elementwise(3, emit_fma)
exp = _elementwise(1, emit_exp)
# If either operand is NaN, the result is the second.
maximum = _elementwise(2, lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
minimum = _elementwise(2, lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
# choose_below(a, b, c, d) is c where a < b, else d.
choose_below = _elementwise(4, lambda builder, a, b, c, d: builder.select(builder.fcmp_ordered("<", a, b), c, d))
magnitude = _elementwise(1, lambda builder, a: builder.bitcast(_size(builder, a), _VECTOR))
with_sign = _elementwise(
    2, lambda builder, a, b: builder.bitcast(builder.or_(_size(builder, a), _sign(builder, b)), _VECTOR)
)


@intrinsic
def keep(typingctx, value, count, other):
    """Returns the first `count` lanes of a vector, with another number in the lanes beyond."""

    def codegen(context, builder, signature, args):
        return builder.select(emit_mask(builder, args[1]), args[0], emit_splat(builder, args[2]))

    return vector(vector, types.int64, types.float32), codegen


def _reduction(emit: Any) -> Any:
    @intrinsic
    def reduce(typingctx, value):
        def codegen(context, builder, signature, args):
            return emit(builder, args[0])

        return types.float32(vector), codegen

    return reduce


total = _reduction(lambda builder, value: emit_totals(builder, [value]))
largest = _reduction(emit_largest)
