"""Products on the CPU: exact conversion of weights, and the same bits for a row in every batch."""

from __future__ import annotations

import pytest
import torch
from tests.backends.cases import random
from tests.backends.test_contract import SHAPES
from torch import Tensor

from outrider.backends.cpu.backend import CPUBackend
from outrider.backends.cpu.kernels import linear as kernel
from outrider.backends.cpu.kernels.activations import NONE, SILU
from outrider.backends.cpu.kernels.jobs import set_word, word
from outrider.backends.cpu.program import Job
from outrider.models.parameters import Linear
from outrider.models.spec import Activation

EPS = 1e-5


def linear(n: int, k: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> Linear:
    return Linear(weight=(random(1, n, k) / k**0.5).to(dtype), bias=random(2, n) if bias else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_16_bit_weights_are_widened_exactly(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    backend, x, norm = CPUBackend(threads=2), random(0, m, k), random(3, k)
    narrow = linear(2 * n, k, bias=True, dtype=dtype)
    wide = Linear(weight=narrow.weight.float(), bias=narrow.bias)  # type: ignore[union-attr]
    assert torch.equal(backend.project(x, narrow), backend.project(x, wide))
    gated = [backend.gated(x, each, Activation.SILU, norm=norm, eps=EPS) for each in (narrow, wide)]
    assert torch.equal(*gated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), [(576, 97), (37, 50), (1536, 33)])
def test_a_row_is_the_same_in_every_batch(k: int, n: int, dtype: torch.dtype) -> None:
    one_thread, two_threads = CPUBackend(threads=1), CPUBackend(threads=2)
    x, norm, residual = random(0, 150, k), random(3, k), random(4, 150, n)
    plain, gate_up = linear(n, k, bias=True, dtype=dtype), linear(2 * n, k, bias=False, dtype=dtype)

    def results(backend: CPUBackend, first: int, stop: int) -> list[Tensor]:
        rows = x[first:stop]
        return [
            backend.project(rows, plain, norm=norm, eps=EPS),
            backend.project_add(rows, plain, residual[first:stop].clone()),
            backend.gated(rows, gate_up, Activation.SILU, norm=norm, eps=EPS),
        ]

    whole = results(two_threads, 0, 150)
    assert all(torch.equal(a, b) for a, b in zip(results(one_thread, 0, 150), whole, strict=True))
    for size in [*range(1, 34), 64]:
        for first in (0, 150 - size):
            for part, full in zip(results(two_threads, first, first + size), whole, strict=True):
                assert torch.equal(part, full[first : first + size]), (size, first)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("k", [64, 576, 4096])
@pytest.mark.parametrize("m", [1, 33, 120, 150, 200, 600])
@pytest.mark.parametrize("activation", [NONE, SILU])
def test_the_sums_of_a_strip_fit_into_the_scratch_of_a_thread(activation: int, m: int, k: int, threads: int) -> None:
    """A gated product has two sums for each element of its result, and the memory behind them is another thread's."""
    job = Job()
    for name, value in ((kernel.M, m), (kernel.N, 4096), (kernel.K, k), (kernel.ACTIVATION, activation)):
        set_word(job.address, name, value)
    kernel.plan_linear(job.address, threads)
    sums = kernel._rows_per_block(m, k) * (1 if activation == NONE else 2)
    assert sums * word(job.address, kernel.WIDTH) * 4 <= kernel._SUMS_BYTES <= kernel.scratch_bytes(k)
