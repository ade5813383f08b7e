"""Packed weights stand for exact numbers, and products with them are computed in integers: defined to the last bit."""

import pytest
import torch
from tests.backends.cases import near
from torch import Tensor
from torch.nn.functional import silu

from outrider.backends.cpu.backend import CPUBackend
from outrider.backends.cpu.packed import BLOCK, PackedMatrix, Packing, interleave
from outrider.backends.cpu.packing import pack_coarsely
from outrider.models.parameters import Linear, stacked
from outrider.models.spec import Activation

ROWS = [*range(1, 21), 33, 130]
OF_FILES = [Packing.FOUR_BITS, Packing.EIGHT_BITS]


def packed_matrix(packing: Packing, n: int, k: int, seed: int = 0) -> PackedMatrix:
    random = torch.Generator().manual_seed(seed)
    if packing is Packing.COARSE:
        return pack_coarsely(torch.randn(n, k, generator=random))
    count, scales = n * k // BLOCK, 2 if packing is Packing.FOUR_BITS else 1
    # Scales have as few bits as in files, so that a product with a small integer is exact.
    head = (torch.randn(count, scales, generator=random) / 64).half().float().view(torch.uint8).view(count, -1)
    numbers = torch.randint(0, 256, (count, packing.block_bytes - 4 * scales), generator=random).to(torch.uint8)
    return PackedMatrix.of(packing, torch.cat([head, numbers], dim=1).view(n, -1))


def test_a_block_expands_to_its_definition() -> None:
    scale, lowest = torch.tensor([0.5]).view(torch.uint8), torch.tensor([-3.0]).view(torch.uint8)
    halves = torch.arange(16, dtype=torch.uint8) | (15 - torch.arange(16, dtype=torch.uint8)) << 4
    four = PackedMatrix.of(Packing.FOUR_BITS, torch.cat([scale, lowest, halves])[None])
    assert four.shape == (1, 32)
    assert four.expand().tolist() == [[i * 0.5 - 3 for i in range(16)] + [(15 - i) * 0.5 - 3 for i in range(16)]]
    signed = torch.arange(-16, 16, dtype=torch.int8).view(torch.uint8)
    eight = PackedMatrix.of(Packing.EIGHT_BITS, torch.cat([scale, signed])[None])
    assert eight.expand().tolist() == [[i * 0.5 for i in range(-16, 16)]]


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns a * b + c, rounded once. A product of two float32 is exact in float64. A sum there that is inexact is
    made odd, so that rounding it again gives the same as rounding once."""
    products, c = torch.broadcast_tensors(a.double() * b.double(), c.double())
    sums = products + c
    added = sums - products
    lost = (products - (sums - added)) + (c - added)
    bits = sums.view(torch.int64)
    return (bits + ((lost != 0) & (bits % 2 == 0)) * (lost.sign() * sums.sign()).long()).view(torch.float64).float()


def narrowed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the 16-bit integers that each block of a row is quantised to, and the scales of blocks."""
    blocks = x.view(len(x), -1, BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    nothing = largest < 2.0**-100
    inverse = torch.where(nothing, 0, torch.tensor(32767.0) / largest)
    scale = torch.where(nothing, 0, largest * torch.tensor(1 / 32767))
    return (blocks.double() * inverse.double()).round().long(), scale


def product(x: Tensor, packed: PackedMatrix) -> Tensor:
    """Returns the product as it is defined: the integer sum of a block is exact; blocks are added in order, in
    float32."""
    numbers, row_scale = narrowed(x)
    blocks = packed.deinterleaved().view(packed.count, -1, packed.packing.block_bytes)
    four = packed.packing is Packing.FOUR_BITS
    scale = blocks[..., :4].contiguous().view(torch.float32)
    if four:
        lowest = blocks[..., 4:8].contiguous().view(torch.float32)
        weights = torch.cat([blocks[..., 8:] & 15, blocks[..., 8:] >> 4], dim=-1).long()
    else:
        weights = blocks[..., 4:].contiguous().view(torch.int8).long()
    total = torch.zeros(len(x), packed.count)
    for block in range(blocks.shape[1]):
        whole = (numbers[:, block] @ weights[:, block].T).float()
        total = fused(whole, scale[:, block].T * row_scale[:, block], total)
        if four:
            row_sum = row_scale[:, block] * numbers[:, block].sum(-1, keepdim=True).float()
            total = fused(lowest[:, block].T, row_sum, total)
    return total


@pytest.mark.parametrize("packing", OF_FILES)
@pytest.mark.parametrize(("n", "k"), [(97, 576), (1, 32), (48, 1536), (515, 64), (24, 96)])
def test_products_are_equal_to_their_definition(packing: Packing, n: int, k: int) -> None:
    """They are equal to the last bit on every processor, and near to those of the expanded weights."""
    backend = CPUBackend(threads=2)
    packed, random = packed_matrix(packing, 2 * n, k), torch.Generator().manual_seed(1)
    x, norm, bias = (torch.randn(*shape, generator=random) for shape in ((130, k), (k,), (2 * n,)))
    residual = torch.randn(130, 2 * n, generator=random)
    stored, wide = Linear(weight=packed, bias=bias), Linear(weight=packed.expand(), bias=bias)
    expected = product(x, packed)
    gates, ups = (product(backend.norm(x, norm, 1e-5), packed) + bias).split(n, dim=1)
    for rows in ROWS:
        some = x[:rows]
        assert torch.equal(backend.project(some, Linear(weight=packed)), expected[:rows]), rows
        assert torch.equal(backend.project(some, stored), expected[:rows] + bias), rows
        assert torch.equal(
            backend.project_add(some, stored, residual[:rows].clone()), residual[:rows] + (expected[:rows] + bias)
        )
        assert near(backend.project(some, stored), backend.project(some, wide), 1e-4), rows
        gated = backend.gated(some, stored, Activation.SILU, norm=norm, eps=1e-5)
        assert torch.allclose(gated, silu(gates[:rows]) * ups[:rows], rtol=1e-6, atol=1e-7), rows


@pytest.mark.parametrize("packing", OF_FILES)
def test_extreme_rows(packing: Packing) -> None:
    """Zeros, elements too small to have an inverse, the extreme 16-bit integers, and an element so large that nothing
    is left of the others in its block."""
    backend, packed = CPUBackend(threads=1), packed_matrix(packing, 40, 64)
    x = torch.randn(13, 64, generator=torch.Generator().manual_seed(3))
    x[0] = 0
    x[1] *= 1e-35
    x[2, :32] = torch.tensor([3.0, -3.0] * 16)
    x[3] *= 1e30
    x[4, 32:] = 0
    x[5] *= 1e-42
    x[6] = -0.0
    for row, largest in zip((7, 8, 9), (2.0**-101, 2.0**-100, 2.0**-99), strict=True):
        x[row] = torch.tensor([largest, -largest / 3] * 32)
    x[10, 31], x[11, 32], x[12, ::32] = 1e20, -1e9, torch.finfo(torch.float32).max
    assert torch.equal(backend.project(x, Linear(weight=packed)), product(x, packed))
    assert torch.equal(backend.project(x[:1], Linear(weight=packed)), torch.zeros(1, 40))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("packing", list(Packing))
def test_elements_that_are_not_finite_spoil_only_their_row(packing: Packing, wrong: float) -> None:
    backend, packed = CPUBackend(threads=2), packed_matrix(packing, 64, 96)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(3))
    clean = backend.project(x, Linear(weight=packed))
    for place in (0, 17, 95):
        spoilt = x.clone()
        spoilt[3, place] = wrong
        y = backend.project(spoilt, Linear(weight=packed))
        assert not torch.isfinite(y[3]).any()
        others = [0, 1, 2, 4, 5, 6]
        assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("packing", list(Packing))
def test_rows_of_a_packed_matrix_are_those_rows(packing: Packing) -> None:
    matrix = packed_matrix(packing, 100, 64)
    whole = matrix.expand()
    wanted: list[slice | Tensor] = [slice(16, 64), slice(48, None), slice(5, 37), slice(96, 100)]
    wanted += [
        slice(None, None, 3),
        slice(16, 64, 2),
        slice(0, 32),
        slice(32, 41),
        torch.tensor([99, 0, 7]),
        torch.arange(100) % 2 == 0,
    ]
    for where in wanted:
        some = matrix.rows(where)
        assert some.shape == (len(whole[where]), 64)
        assert torch.equal(some.expand(), whole[where])
        filled = PackedMatrix(packing=packing, data=some.data, count=len(some.data))
        assert not filled.deinterleaved()[some.count :].any(), "filled up with something else than zeros"
    for parts in ((32, 16, 52), (5, 90, 5), (100,)):
        pieces = torch.arange(100).split(parts)
        joined = stacked([matrix.rows(piece) for piece in pieces])
        assert isinstance(joined, PackedMatrix)
        assert torch.equal(joined.expand(), whole)


@pytest.mark.parametrize("packing", list(Packing))
def test_rows_are_filled_up_with_zeros(packing: Packing) -> None:
    """Whatever the memory held before: denormals there would slow down the lanes whose results are not used."""
    rows = packed_matrix(packing, 21, 64).deinterleaved()
    data = torch.full((32, rows.shape[1]), 255, dtype=torch.uint8)
    data[:21] = rows
    interleave(packing, data, 21)
    assert torch.equal(PackedMatrix(packing=packing, data=data, count=21).deinterleaved(), rows)
    assert not PackedMatrix(packing=packing, data=data, count=32).deinterleaved()[21:].any()


@pytest.mark.parametrize("packing", list(Packing))
def test_a_matrix_may_be_woven_in_pieces(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = packed_matrix(packing, 150, 64).deinterleaved()
    for pieces in (1, 2, 3, 20):
        monkeypatch.setattr("outrider.backends.cpu.packed._CHUNK_BYTES", pieces * 16 * rows.shape[1])
        assert torch.equal(PackedMatrix.of(packing, rows).deinterleaved(), rows)


@pytest.mark.parametrize("packing", OF_FILES)
def test_embeddings_are_rows_of_the_matrix(packing: Packing) -> None:
    backend, matrix = CPUBackend(threads=2), packed_matrix(packing, 300, 96)
    token_ids = torch.tensor([0, 299, 5, 5, 17] * 11)
    for scale in (1.0, 2.5):
        assert torch.equal(backend.embed(token_ids, matrix, scale), matrix.expand()[token_ids] * scale)
