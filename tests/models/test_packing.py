"""Matrices that are packed here: near to what they were, and what cannot be packed left alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from outrider.models.packed import PackedMatrix
from outrider.models.packing import ROOM_BYTES, Packer, pack
from outrider.models.parameters import Linear, Matrix, rows_of, stacked


def random(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def written(matrix: Matrix) -> torch.Tensor:
    return matrix.expand() if isinstance(matrix, PackedMatrix) else matrix


def test_every_number_is_the_nearest() -> None:
    values = random(40, 96).float()
    values[3] = 0.0
    values[4, :32] *= 1e-20
    found = pack(values)
    assert found.shape == (40, 96)
    step = values.view(40, 3, 32).abs().amax(dim=-1, keepdim=True) / 127
    off = (found.expand() - values).view(40, 3, 32).abs()
    assert bool((off <= step * 0.5001).all())
    assert bool((found.expand()[3] == 0).all())


@pytest.mark.parametrize("kept", [random(4, 48), random(4, 64, torch.float32), pack(random(4, 64))])
def test_what_has_no_whole_blocks_or_other_bits_stays(kept: Matrix) -> None:
    assert Packer()(kept) is kept


def test_memory_is_taken_in_large_pieces_and_never_twice() -> None:
    packer = Packer()
    matrices = [random(rows, 64) for rows in (1, 3, 500, 7)]
    large = random(ROOM_BYTES // 64, 64)
    found = [packer(matrix) for matrix in [*matrices, large, *matrices]]
    for matrix, original in zip(found, [*matrices, large, *matrices], strict=True):
        assert torch.equal(written(matrix), pack(original).expand())
    places = sorted((m.data.data_ptr(), m.data.nbytes) for m in found if isinstance(m, PackedMatrix))
    assert all(first + size <= second for (first, size), (second, _) in pairwise(places))


def test_a_piece_that_is_full_is_not_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix begins on a boundary, so small ones take more room than they have bytes."""
    monkeypatch.setattr("outrider.models.packing.ROOM_BYTES", 1024)
    packer = Packer()
    for rows in (1, 1, 2, 1, 3, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2):
        assert torch.equal(written(packer(random(rows, 64))), pack(random(rows, 64)).expand())


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_a_product_and_products_of_rows(packed: bool) -> None:
    matrix: Matrix = pack(random(10, 64)) if packed else random(10, 64)
    linear = Linear(weight=matrix, bias=torch.arange(10.0))
    part = linear.rows(slice(4, None))
    assert part.bias is not None
    assert part.bias.tolist() == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert torch.equal(written(part.weight), written(matrix)[4:])
    chosen = rows_of(matrix, torch.tensor([7, 2]))
    assert torch.equal(written(chosen), written(matrix)[[7, 2]])
    assert torch.equal(written(stacked([matrix, chosen])), torch.cat([written(matrix), written(chosen)]))
