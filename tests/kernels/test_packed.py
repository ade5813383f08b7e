"""Packed weights stand for exact numbers: everything is as with the same weights written out, to the last bit."""

import pytest
import torch

from outrider.layers.cpu_ops import NumbaOps
from outrider.models.packed import BLOCK, PackedMatrix, Packing
from outrider.models.parameters import Linear
from outrider.models.spec import Activation

ROWS = [*range(1, 21), 33, 130]


def packed_matrix(packing: Packing, n: int, k: int, seed: int = 0) -> PackedMatrix:
    random = torch.Generator().manual_seed(seed)
    count, scales = n * k // BLOCK, 2 if packing is Packing.FOUR_BITS else 1
    # As files have them: of few enough bits that a product with a small number is exact.
    head = (torch.randn(count, scales, generator=random) / 64).half().float().view(torch.uint8).view(count, -1)
    numbers = torch.randint(0, 256, (count, packing.block_bytes - 4 * scales), generator=random).to(torch.uint8)
    return PackedMatrix(packing=packing, data=torch.cat([head, numbers], dim=1).view(n, -1))


def test_a_block_means_what_it_says() -> None:
    scale, lowest = torch.tensor([0.5]).view(torch.uint8), torch.tensor([-3.0]).view(torch.uint8)
    halves = torch.arange(16, dtype=torch.uint8) | (15 - torch.arange(16, dtype=torch.uint8)) << 4
    four = PackedMatrix(packing=Packing.FOUR_BITS, data=torch.cat([scale, lowest, halves])[None])
    assert four.shape == (1, 32)
    assert four.expand().tolist() == [[i * 0.5 - 3 for i in range(16)] + [(15 - i) * 0.5 - 3 for i in range(16)]]
    signed = torch.arange(-16, 16, dtype=torch.int8).view(torch.uint8)
    eight = PackedMatrix(packing=Packing.EIGHT_BITS, data=torch.cat([scale, signed])[None])
    assert eight.expand().tolist() == [[i * 0.5 for i in range(-16, 16)]]


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize(("n", "k"), [(97, 576), (1, 32), (50, 1536), (515, 64)])
def test_products_are_those_of_the_weights_written_out(packing: Packing, n: int, k: int) -> None:
    ops = NumbaOps(threads=2)
    packed, random = packed_matrix(packing, 2 * n, k), torch.Generator().manual_seed(1)
    x, norm, bias = (torch.randn(*shape, generator=random) for shape in ((130, k), (k,), (2 * n,)))
    residual = torch.randn(130, 2 * n, generator=random)
    stored, wide = Linear(weight=packed, bias=bias), Linear(weight=packed.expand(), bias=bias)
    for rows in ROWS:
        some = x[:rows]
        assert torch.equal(ops.project(some, stored), ops.project(some, wide)), rows
        normed = [ops.gated(some, each, Activation.SILU, norm=norm, eps=1e-5) for each in (stored, wide)]
        assert torch.equal(*normed), rows
        added = [ops.project_add(some, each, residual[:rows].clone()) for each in (stored, wide)]
        assert torch.equal(*added), rows


@pytest.mark.parametrize("packing", list(Packing))
def test_a_row_is_the_same_in_every_batch(packing: Packing) -> None:
    ops, alone = NumbaOps(threads=2), NumbaOps(threads=1)
    linear = Linear(weight=packed_matrix(packing, 211, 576))
    x = torch.randn(130, 576, generator=torch.Generator().manual_seed(1))
    whole = ops.project(x, linear)
    assert torch.equal(alone.project(x, linear), whole)
    for rows in ROWS:
        assert torch.equal(ops.project(x[-rows:], linear), whole[-rows:]), rows


@pytest.mark.parametrize("packing", list(Packing))
def test_embeddings_are_rows_of_the_matrix(packing: Packing) -> None:
    ops, matrix = NumbaOps(threads=2), packed_matrix(packing, 300, 96)
    tokens = torch.tensor([0, 299, 5, 5, 17] * 11)
    assert torch.equal(ops.embed(tokens, matrix, 1.0), matrix.expand()[tokens])
    assert torch.equal(ops.embed(tokens, matrix, 2.5), matrix.expand()[tokens] * 2.5)


@pytest.mark.parametrize("wrong", [-1, 300])
def test_a_token_outside_the_matrix_is_refused(wrong: int) -> None:
    ops, matrix = NumbaOps(threads=1), packed_matrix(Packing.EIGHT_BITS, 300, 96)
    with pytest.raises(IndexError, match=str(wrong)):
        ops.embed(torch.tensor([3, wrong]), matrix, 1.0)
