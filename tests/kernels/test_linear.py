"""Products with their prologues and epilogues, against the plain version and against themselves in other batches."""

import pytest
import torch
from tests.kernels.cases import near

from outrider.kernels import linear as kernel
from outrider.kernels.activations import NONE
from outrider.kernels.jobs import set_word, word
from outrider.layers.cpu_ops import NumbaOps
from outrider.layers.cpu_program import Job
from outrider.layers.ops import TorchOps
from outrider.models.parameters import Linear
from outrider.models.spec import Activation

PLAIN = TorchOps()
SHAPES = [
    (1, 64, 48),
    (3, 37, 50),
    (5, 576, 960),
    (33, 100, 7),
    (64, 13, 129),
    (200, 576, 257),
    (41, 1536, 64),
    (2, 5, 1),
]


@pytest.fixture(scope="module", params=[1, 2])
def ops(request: pytest.FixtureRequest) -> NumbaOps:
    return NumbaOps(threads=request.param)


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _linear(n: int, k: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> Linear:
    return Linear(weight=(_random(1, n, k) / k**0.5).to(dtype), bias=_random(2, n) if bias else None)


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_agree(ops: NumbaOps, m: int, k: int, n: int, bias: bool) -> None:
    x, linear, norm = _random(0, m, k), _linear(n, k, bias=bias), _random(3, k)
    assert near(ops.project(x, linear), PLAIN.project(x, linear))
    assert near(ops.project(x, linear, norm=norm, eps=1e-5), PLAIN.project(x, linear, norm=norm, eps=1e-5))


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("post_norm", [False, True])
def test_what_is_added_to_the_residual_agrees(ops: NumbaOps, m: int, k: int, n: int, post_norm: bool) -> None:
    x, linear, residual = _random(0, m, k), _linear(n, k, bias=True), _random(4, m, n)
    norm = _random(5, n) if post_norm else None
    plain = PLAIN.project_add(x, linear, residual.clone(), post_norm=norm, eps=1e-6)
    assert near(ops.project_add(x, linear, residual.clone(), post_norm=norm, eps=1e-6), plain)


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("bias", [False, True])
def test_gated_activations_agree(ops: NumbaOps, m: int, k: int, n: int, activation: Activation, bias: bool) -> None:
    # Large enough that the clamps of the clamped one are reached.
    x, linear, norm = _random(0, m, k) * 4, _linear(2 * n, k, bias=bias), _random(3, k) * 4
    fast = ops.gated(x, linear, activation, norm=norm, eps=1e-5)
    assert near(fast, PLAIN.gated(x, linear, activation, norm=norm, eps=1e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_16_bit_weights_are_widened_exactly(ops: NumbaOps, m: int, k: int, n: int, dtype: torch.dtype) -> None:
    x, narrow = _random(0, m, k), _linear(2 * n, k, bias=True, dtype=dtype)
    wide = Linear(weight=narrow.weight.float(), bias=narrow.bias)
    assert torch.equal(ops.project(x, narrow), ops.project(x, wide))
    norm = _random(3, k)
    gated = ops.gated(x, narrow, Activation.SILU, norm=norm, eps=1e-5)
    assert torch.equal(gated, ops.gated(x, wide, Activation.SILU, norm=norm, eps=1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), [(576, 97), (37, 50), (1536, 33)])
def test_a_row_is_the_same_in_every_batch(k: int, n: int, dtype: torch.dtype) -> None:
    one_thread, ops = NumbaOps(threads=1), NumbaOps(threads=2)
    x, norm, residual = _random(0, 150, k), _random(3, k), _random(4, 150, n)
    linear, gate_up = _linear(n, k, bias=True, dtype=dtype), _linear(2 * n, k, bias=False, dtype=dtype)

    def results(ops: NumbaOps, first: int, stop: int) -> list[torch.Tensor]:
        rows = x[first:stop]
        return [
            ops.project(rows, linear, norm=norm, eps=1e-5),
            ops.project_add(rows, linear, residual[first:stop].clone()),
            ops.gated(rows, gate_up, Activation.SILU, norm=norm, eps=1e-5),
        ]

    whole = results(ops, 0, 150)
    for size in [*range(1, 34), 64, 150]:
        for first in (0, 150 - size):
            for part, full in zip(results(ops, first, first + size), whole, strict=True):
                assert torch.equal(part, full[first : first + size]), (size, first)
    for part, full in zip(results(one_thread, 0, 150), whole, strict=True):
        assert torch.equal(part, full)


def test_rows_of_a_wider_tensor_are_read_in_place(ops: NumbaOps) -> None:
    wide, linear = _random(0, 6, 80), _linear(24, 40, bias=False)
    assert torch.equal(ops.project(wide[:, 20:60], linear), ops.project(wide[:, 20:60].contiguous(), linear))


def test_norms_agree(ops: NumbaOps) -> None:
    for k in (1, 15, 16, 576, 577):
        x, weight = _random(0, 40, k), _random(1, k)
        assert near(ops.norm(x, weight, 1e-5), PLAIN.norm(x, weight, 1e-5))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("k", [64, 576, 4096])
@pytest.mark.parametrize("m", [1, 33, 120, 150, 200, 600])
@pytest.mark.parametrize("gated", [False, True])
def test_the_sums_of_a_strip_fit_into_the_scratch_of_a_thread(gated: bool, m: int, k: int, threads: int) -> None:
    """A gated product has two sums for each number that it gives, and what lies behind them is another thread's."""
    job = Job()
    activation = next(number for number in range(8) if number != NONE) if gated else NONE
    for name, value in ((kernel.M, m), (kernel.N, 4096), (kernel.K, k), (kernel.ACTIVATION, activation)):
        set_word(job.address, name, value)
    kernel.plan_linear(job.address, threads)
    lines = kernel._rows_per_block(m, k) * (2 if gated else 1)
    assert lines * word(job.address, kernel.WIDTH) * 4 <= kernel._SUMS_BYTES
    assert kernel.scratch_bytes(k) >= kernel._SUMS_BYTES
