"""Coarse weights, and products of 8-bit rows with them: defined to the last bit, in any batch and on any processor."""

import pytest
import torch
from tests.backends.cpu.test_packed import ROWS
from torch import Tensor
from torch.nn.functional import silu

from outrider.backends.cpu.backend import CPUBackend
from outrider.backends.cpu.packed import COARSE_OFFSET, PackedMatrix, Packing
from outrider.backends.cpu.packing import Packer, pack, pack_coarsely
from outrider.models.parameters import Linear
from outrider.models.spec import Activation

LARGEST = 127.0


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(x: Tensor, coarse: PackedMatrix) -> Tensor:
    """Returns the product as it is defined: sums of integers are exact, and are multiplied with both scales at once."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    nothing = largest < 2.0**-100
    inverse = torch.where(nothing, 0, torch.tensor(LARGEST) / largest)
    row_scale = torch.where(nothing, 0, largest * torch.tensor(1 / LARGEST))
    numbers = (x.double() * inverse.double()).round().long()
    rows = coarse.deinterleaved()
    weights = rows[:, 4:].long() - COARSE_OFFSET
    scale = rows[:, :4].contiguous().view(torch.float32)
    return (numbers @ weights.T).float() * (scale.T * row_scale)


def test_every_element_becomes_the_nearest_integer() -> None:
    values = random(40, 96)
    values[3] = 0.0
    values[4] *= 1e-20
    found = pack_coarsely(values)
    assert found.shape == (40, 96)
    step = values.abs().amax(dim=-1, keepdim=True) / 63
    assert bool(((found.expand() - values).abs() <= step * 0.5001).all())
    numbers = found.deinterleaved()[:, 4:]
    assert int(numbers.min()) == 1
    assert int(numbers.max()) == 127, "seven bits: two products with eight bits must fit into sixteen"
    assert bool((found.expand()[3] == 0).all())


@pytest.mark.parametrize(("n", "k"), [(97, 576), (1, 32), (48, 1536), (515, 64), (24, 96)])
def test_products_are_equal_to_their_definition(n: int, k: int) -> None:
    backend, coarse = CPUBackend(threads=2), pack_coarsely(random(2 * n, k))
    x, norm, bias, residual = random(130, k, seed=1), random(k, seed=2), random(2 * n, seed=3), random(130, 2 * n)
    stored = Linear(weight=coarse, bias=bias)
    expected = product(x, coarse)
    gates, ups = (product(backend.norm(x, norm, 1e-5), coarse) + bias).split(n, dim=1)
    for rows in ROWS:
        some = x[:rows]
        assert torch.equal(backend.project(some, Linear(weight=coarse)), expected[:rows]), rows
        assert torch.equal(
            backend.project_add(some, stored, residual[:rows].clone()), residual[:rows] + (expected[:rows] + bias)
        )
        gated = backend.gated(some, stored, Activation.SILU, norm=norm, eps=1e-5)
        assert torch.allclose(gated, silu(gates[:rows]) * ups[:rows], rtol=1e-6, atol=1e-7), rows


def test_products_are_near_those_of_the_matrix() -> None:
    """Seven bits of the weights and eight of the rows leave an error of some two percent."""
    values, x = random(300, 576), random(9, 576, seed=1)
    found, exact = CPUBackend(threads=1).project(x, Linear(weight=pack_coarsely(values))), x @ values.T
    assert 0.001 < float((found - exact).norm() / exact.norm()) < 0.03


def test_extreme_rows() -> None:
    """Sums as large as they get, zeros, and elements too small to have an inverse."""
    backend, k = CPUBackend(threads=1), 4096
    coarse = pack_coarsely(torch.cat([torch.ones(1, k), -torch.ones(1, k), random(30, k)]))
    x = random(10, k, seed=3)
    x[0] = 0
    x[1] *= 1e-35
    x[2], x[3] = 1.0, -1.0
    x[4] *= 1e30
    x[5] *= 1e-42
    x[6] = -0.0
    x[7], x[8] = 2.0**-101, 2.0**-100
    x[9, 5] = 1e20
    assert torch.equal(backend.project(x, Linear(weight=coarse)), product(x, coarse))
    assert torch.equal(backend.project(x[:1], Linear(weight=coarse)), torch.zeros(1, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_matrix_of_numbers_is_coarsened(dtype: torch.dtype) -> None:
    values = random(40, 64).to(dtype)
    found = CPUBackend(threads=1).coarsen(values)
    assert isinstance(found, PackedMatrix)
    assert found.packing is Packing.COARSE
    assert torch.equal(found.expand(), pack_coarsely(values).expand())


@pytest.mark.parametrize("kept", [random(4, 48), pack(random(4, 64)), pack_coarsely(random(4, 64)), random(1, 65568)])
def test_other_matrices_stay_as_they_are(kept: Tensor | PackedMatrix) -> None:
    """Packed ones may be the target's own, and sums over longer rows than 65,536 might not fit into 32 bits."""
    assert Packer().coarsen(kept) is kept
