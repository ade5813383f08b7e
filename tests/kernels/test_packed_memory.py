"""Products with packed weights stay within the memory that they are given, whatever their shape."""

from typing import ClassVar

import pytest
import torch
from tests.kernels.test_packed import packed_matrix, product
from torch import Tensor

from outrider.kernels import linear
from outrider.layers import cpu_ops
from outrider.layers.cpu_ops import NumbaOps
from outrider.models.packed import Packing
from outrider.models.spec import Activation

GUARD, GUARD_BYTES = 0xA5, 64 << 10


class GuardedBuffer:
    """Exactly what was asked for, with a guard before and behind it."""

    all: ClassVar[list["GuardedBuffer"]] = []

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.all.append(self)

    def at_least(self, size: int) -> int:
        self.check()
        self.tensor = torch.full((size + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
        # What was left by another call: no number, and no zeros.
        self.tensor[GUARD_BYTES:-GUARD_BYTES] = 0xFF
        return self.tensor.data_ptr() + GUARD_BYTES

    def check(self) -> None:
        assert (self.tensor[:GUARD_BYTES] == GUARD).all(), "written before a buffer"
        assert (self.tensor[-GUARD_BYTES:] == GUARD).all(), "written behind a buffer"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> type[GuardedBuffer]:
    monkeypatch.setattr(GuardedBuffer, "all", [])
    monkeypatch.setattr(cpu_ops, "_Buffer", GuardedBuffer)
    # The weights of a tile, which follow the sums, are not written out here: the guard lies right behind the sums.
    monkeypatch.setattr(linear, "scratch_bytes", lambda _k: linear._SUMS_BYTES)
    return GuardedBuffer


def gated(ops: NumbaOps, sums: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """What follows a gated product: that of the sums themselves with ones, which is exact."""
    return ops._linear(sums, torch.eye(sums.shape[1]), bias, activation=activation)


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("n", [1, 15, 17, 49, 161, 600])
def test_blocks_of_rows_and_strips_fit_their_scratch(packing: Packing, n: int, guarded: type[GuardedBuffer]) -> None:
    """The shorter the rows, the more of them in a block; the more weights, the wider a strip; halves of a gated product
    begin anywhere in a group."""
    ops, plain = NumbaOps(threads=1), NumbaOps(threads=2)
    random = torch.Generator().manual_seed(n)
    bias = torch.randn(2 * n, generator=random)
    for rows, k in ((700, 32), (257, 64), (256, 32), (31, 2304)):
        packed, x = packed_matrix(packing, 2 * n, k, seed=k), torch.randn(rows, k, generator=random)
        expected = product(x, packed)
        room = torch.full((rows + 2, 2 * n + 3), -7.0)
        ops._linear(x, packed, bias, out=room[1:-1, : 2 * n])
        assert torch.equal(room[1:-1, : 2 * n], expected + bias)
        room[1:-1, : 2 * n] = -7.0
        assert (room == -7.0).all(), "written outside of the rows"
        inner = ops._linear(x, packed, bias, activation=Activation.SILU)
        for buffer in guarded.all:
            buffer.check()
        assert torch.equal(inner, gated(plain, expected, bias, Activation.SILU))


@pytest.mark.parametrize("packing", list(Packing))
def test_rows_may_lie_apart(packing: Packing, guarded: type[GuardedBuffer]) -> None:
    ops, packed = NumbaOps(threads=2), packed_matrix(packing, 37, 96)
    x = torch.randn(40, 3, 96, generator=torch.Generator().manual_seed(2))
    expected = product(x[:, 1].contiguous(), packed)
    assert torch.equal(ops._linear(x[:, 1], packed, None), expected)
    assert torch.equal(ops._linear(x[3, 1].expand(9, 96), packed, None), expected[3].expand(9, 37))
    assert torch.equal(ops._linear(x[:, 1].T.contiguous().T, packed, None), expected)
    for buffer in guarded.all:
        buffer.check()
