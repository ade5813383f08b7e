"""Products with packed weights stay within the memory that they are given, whatever their shape."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from tests.backends.cases import random
from tests.backends.cpu.test_coarse import product as product_with_coarse
from tests.backends.cpu.test_packed import packed_matrix
from tests.backends.cpu.test_packed import product as product_with_blocks
from torch import Tensor
from torch.nn.functional import silu

from outrider.backends.cpu import backend as cpu_backend
from outrider.backends.cpu.backend import CPUBackend
from outrider.backends.cpu.kernels import linear
from outrider.backends.cpu.packed import PackedMatrix, Packing
from outrider.models.parameters import Linear, Matrix
from outrider.models.spec import Activation

GUARD, GUARD_BYTES = 0xA5, 64 << 10


class GuardedBuffer:
    """Scratch memory of exactly the size that was requested, between two guards."""

    all: ClassVar[list[GuardedBuffer]] = []

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.all.append(self)

    def at_least(self, size: int) -> int:
        self.check()
        self.tensor = torch.full((size + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
        # NaN, as another call may leave it.
        self.tensor[GUARD_BYTES:-GUARD_BYTES] = 0xFF
        return self.tensor.data_ptr() + GUARD_BYTES

    def check(self) -> None:
        assert (self.tensor[:GUARD_BYTES] == GUARD).all(), "written before a buffer"
        assert (self.tensor[-GUARD_BYTES:] == GUARD).all(), "written behind a buffer"


def product(x: Tensor, weight: Matrix) -> Tensor:
    assert isinstance(weight, PackedMatrix)
    return product_with_coarse(x, weight) if weight.packing is Packing.COARSE else product_with_blocks(x, weight)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> type[GuardedBuffer]:
    monkeypatch.setattr(GuardedBuffer, "all", [])
    monkeypatch.setattr(cpu_backend, "ScratchBuffer", GuardedBuffer)
    # Packed products do not use the widened weights, which follow the sums: the guard lies right behind the sums.
    monkeypatch.setattr(linear, "scratch_bytes", lambda _k: linear._SUMS_BYTES)
    return GuardedBuffer


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("n", [1, 15, 17, 49, 161, 600])
def test_blocks_of_rows_and_strips_fit_their_scratch(packing: Packing, n: int, guarded: type[GuardedBuffer]) -> None:
    """The shorter the rows, the more of them in a block; the more weights, the wider a strip; the halves of a gated
    product begin anywhere in a group."""
    backend, bias = CPUBackend(threads=1), random(n, 2 * n)
    for rows, k in ((700, 32), (257, 64), (256, 32), (31, 2304)):
        stored = Linear(weight=packed_matrix(packing, 2 * n, k, seed=k), bias=bias)
        x, norm = random(rows, rows, k), random(k, k)
        room = torch.full((rows + 2, 2 * n + 3), -7.0)
        place = room[1:-1, : 2 * n]
        place.zero_()
        # The result is written to where the residual lies.
        assert torch.equal(backend.project_add(x, stored, place), product(x, stored.weight) + bias)
        place.fill_(-7.0)
        assert (room == -7.0).all(), "written outside of the rows"
        gates, ups = backend.project(x, stored, norm=norm, eps=1e-5).chunk(2, dim=1)
        gated = backend.gated(x, stored, Activation.SILU, norm=norm, eps=1e-5)
        assert torch.allclose(gated, silu(gates) * ups, rtol=1e-5, atol=1e-6)
        for buffer in guarded.all:
            buffer.check()


@pytest.mark.parametrize("packing", list(Packing))
def test_rows_may_lie_apart(packing: Packing, guarded: type[GuardedBuffer]) -> None:
    backend, weights = CPUBackend(threads=2), Linear(weight=packed_matrix(packing, 37, 96))
    x = random(2, 40, 3, 96)
    expected = product(x[:, 1].contiguous(), weights.weight)
    assert torch.equal(backend.project(x[:, 1], weights), expected)
    assert torch.equal(backend.project(x[3, 1].expand(9, 96), weights), expected[3].expand(9, 37))
    assert torch.equal(backend.project(x[:, 1].T.contiguous().T, weights), expected)
    for buffer in guarded.all:
        buffer.check()
