"""Matrices of drafters in 8 bits, and packed matrices in memory of their own."""

from __future__ import annotations

import pytest
import torch

from outrider.backends.cpu.packed import PackedMatrix
from outrider.backends.cpu.packing import Packer, pack
from outrider.models.parameters import Linear, Matrix, rows_of, stacked


def random(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def expanded(matrix: Matrix) -> torch.Tensor:
    return matrix.expand() if isinstance(matrix, PackedMatrix) else matrix


def test_every_element_becomes_the_nearest_integer() -> None:
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
def test_matrices_of_other_types_or_without_whole_blocks_stay_as_they_are(kept: Matrix) -> None:
    assert Packer().compact(kept) is kept


def test_matrices_keep_their_content_while_others_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share memory, in which every matrix begins on a boundary: small ones take more room than they have bytes."""
    monkeypatch.setattr("outrider.backends.cpu.packing.ROOM_BYTES", 1024)
    packer = Packer()
    originals = [random(rows, 64) for rows in (1, 1, 2, 1, 3, 1, 1, 5, 500, *[1] * 12, 2, 2, 2, 7)]
    for original, found in zip(originals, [packer.compact(original) for original in originals], strict=True):
        assert torch.equal(expanded(found), pack(original).expand())


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_a_product_and_products_of_rows(packed: bool) -> None:
    matrix: Matrix = pack(random(10, 64)) if packed else random(10, 64)
    linear = Linear(weight=matrix, bias=torch.arange(10.0))
    part = linear.rows(slice(4, None))
    assert part.bias is not None
    assert part.bias.tolist() == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert torch.equal(expanded(part.weight), expanded(matrix)[4:])
    chosen = rows_of(matrix, torch.tensor([7, 2]))
    assert torch.equal(expanded(chosen), expanded(matrix)[[7, 2]])
    assert torch.equal(expanded(stacked([matrix, chosen])), torch.cat([expanded(matrix), expanded(chosen)]))
