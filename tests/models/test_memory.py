"""Memory for KV is there at once and costs nothing until it is used."""

from __future__ import annotations

import os

import pytest
import torch

from outrider.bench.server_process import resident_mb
from outrider.models.weights.memory import HUGE_PAGE_BYTES, zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [3, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_zero_and_can_be_written(rows: int, dtype: torch.dtype) -> None:
    tensor = zeros((rows, 512), dtype, CPU)
    assert (tensor.shape, tensor.dtype) == ((rows, 512), dtype)
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor[-1] = 1
    assert tensor.sum() == 512


def test_gigabytes_that_nobody_has_touched_take_no_memory() -> None:
    before = resident_mb(os.getpid())
    tensor = zeros((1 << 28,), torch.float32, CPU)
    assert resident_mb(os.getpid()) - before < 64
    tensor[0], tensor[-1] = 1, 2
    assert resident_mb(os.getpid()) - before < 64
    assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0
