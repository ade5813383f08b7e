"""Raw memory for compiled code: scalars at an address, atomic words, futexes.

Kernels take addresses as plain integers, because unboxing an array takes longer than a small kernel.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
Builder = Any
"""An llvmlite IRBuilder, or a value made by one: neither package has types."""


def pointer(builder: Builder, address: Builder, element: Any) -> Builder:
    return builder.inttoptr(address, element.as_pointer())


def declare(builder: Builder, name: str, function_type: Any) -> Builder:
    """Returns a declaration of a function that LLVM knows or the process exports."""
    module = builder.module
    return module.globals.get(name) or ir.Function(module, function_type, name)


def _loader(numba_type: Any, element: Any) -> Any:
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.load(pointer(builder, args[0], element), align=4)

        return numba_type(types.int64), codegen

    return load


def _storer(numba_type: Any, element: Any) -> Any:
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            builder.store(args[1], pointer(builder, args[0], element), align=4)

        return types.void(types.int64, numba_type), codegen

    return store


load_i32 = _loader(types.int32, I32)
load_i64 = _loader(types.int64, I64)
load_f32 = _loader(types.float32, F32)
store_i64 = _storer(types.int64, I64)
store_f32 = _storer(types.float32, F32)


@intrinsic
def atomic_load(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(pointer(builder, args[0], I64), "acquire", 8)

    return types.int64(types.int64), codegen


def _read_modify_write(operation: str) -> Any:
    @intrinsic
    def update(typingctx, address, value):
        def codegen(context, builder, signature, args):
            return builder.atomic_rmw(operation, pointer(builder, args[0], I64), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), codegen

    return update


atomic_add = _read_modify_write("add")
atomic_swap = _read_modify_write("xchg")
"""Both return the previous value and are full barriers."""


@intrinsic
def atomic_claim(typingctx, address, expected, desired):
    """Compares and swaps. Returns whether the swap took place."""

    def codegen(context, builder, signature, args):
        pair = builder.cmpxchg(pointer(builder, args[0], I64), args[1], args[2], "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    def codegen(context, builder, signature, args):
        builder.call(declare(builder, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), [])), [])

    return types.void(), codegen


@intrinsic
def prefetch(typingctx, address):
    def codegen(context, builder, signature, args):
        emit_prefetch(builder, args[0])

    return types.void(types.int64), codegen


def emit_prefetch(builder: Builder, address: Builder) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    prefetch_function = declare(builder, "llvm.prefetch.p0i8", kind)
    read, keep, data = I32(0), I32(3), I32(1)
    builder.call(prefetch_function, [pointer(builder, address, I8), read, keep, data])


@intrinsic
def call_kernel(typingctx, kernel, job, chunk, scratch):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.void(*([types.int64] * 4)), codegen


_SYS_FUTEX, _FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 202, 128, 129


@intrinsic
def futex_wait(typingctx, address, expected):
    """Sleeps until woken; returns at once if the low 32 bits at the address are not the expected ones."""

    def codegen(context, builder, signature, args):
        _futex(builder, args[0], _FUTEX_WAIT_PRIVATE, args[1])

    return types.void(types.int64, types.int64), codegen


@intrinsic
def futex_wake(typingctx, address):
    """Wakes all threads that sleep on the address."""

    def codegen(context, builder, signature, args):
        _futex(builder, args[0], _FUTEX_WAKE_PRIVATE, I64(0x7FFFFFFF))

    return types.void(types.int64), codegen


def _futex(builder: Builder, address: Builder, operation: int, value: Builder) -> None:
    syscall = declare(builder, "syscall", ir.FunctionType(I64, [I64], var_arg=True))
    no_timeout = I64(0)
    builder.call(syscall, [I64(_SYS_FUTEX), address, I64(operation), value, no_timeout, I64(0), I64(0)])
