"""Attention on the CPU: 16-bit caches, the same bits for a row in every batch, and nothing read outside its range."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.backends.cases import LONG, chosen, layer, mixed_ranges, moved, near, paged, random
from torch import Tensor

from outrider.backends.attention import AttentionLayer
from outrider.backends.cpu.backend import CPUBackend
from outrider.backends.reference.backend import ReferenceBackend


def qkv_of(layer: AttentionLayer, count: int) -> Tensor:
    return random(8, count, (layer.heads + 2 * layer.kv_heads) * layer.head_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [20, 64])
@pytest.mark.parametrize("head_norms", [False, True])
def test_16_bit_caches_agree_with_the_reference(dtype: torch.dtype, dim: int, head_norms: bool) -> None:
    of, ranges, backend = layer(heads=9, kv_heads=3, dim=dim, head_norms=head_norms), mixed_ranges(), CPUBackend(2)
    kv, rows = paged(of, ranges, 16, dtype)
    qkv, plain_kv, stored_kv = qkv_of(of, len(ranges)), moved(kv, kv.keys.device), moved(kv, kv.keys.device)
    # A last bit of a key may round to another 16-bit number.
    assert near(backend.attend(qkv, of, kv, rows), ReferenceBackend().attend(qkv, of, plain_kv, rows), 1e-2)
    assert near(kv.keys, plain_kv.keys, 1e-2)
    assert torch.equal(kv.values, plain_kv.values)
    backend.store(qkv[:, of.heads * dim :], of, stored_kv, rows)
    assert torch.equal(stored_kv.keys, kv.keys)
    assert torch.equal(stored_kv.values, kv.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_row_is_the_same_in_every_batch(dtype: torch.dtype, softcap: float | None) -> None:
    of, ranges = layer(heads=9, kv_heads=3, dim=64, softcap=softcap, sinks=True), mixed_ranges()
    kv, rows = paged(of, ranges, 16, dtype)
    qkv, count = qkv_of(of, len(ranges)), len(ranges)
    two, one = CPUBackend(threads=2), CPUBackend(threads=1)
    whole = two.attend(qkv, of, kv, rows)
    assert torch.equal(one.attend(qkv, of, kv, rows), whole)
    # Every batch writes the same keys and values once more.
    for size in [*range(1, 34), 50]:
        for first in range(0, count - size + 1, size):
            which = list(range(first, first + size))
            assert torch.equal(two.attend(qkv[which], of, kv, chosen(rows, which, 16)), whole[which]), which
    for size, backend in itertools.product((1, 3, 20), (one, two)):
        which = torch.randperm(count, generator=torch.Generator().manual_seed(7))[:size].tolist()
        assert torch.equal(backend.attend(qkv[which], of, kv, chosen(rows, which, 16)), whole[which])


def test_a_row_is_the_same_whatever_the_page_size() -> None:
    of = layer(heads=6, kv_heads=2, dim=64)
    content = random(7, 2, LONG, of.kv_heads, of.head_dim)
    results = []
    for page_tokens in (1, 16, 100):
        kv, rows = paged(of, [(0, LONG - 1, 3, LONG)], page_tokens)
        for position in range(LONG):
            page, offset = int(rows.block_tables[0, position // page_tokens]), position % page_tokens
            kv.keys[page, :, offset], kv.values[page, :, offset] = content[0, position], content[1, position]
        results.append(CPUBackend(threads=2).attend(qkv_of(of, 1), of, kv, rows))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_pages_outside_the_range_of_a_row_are_not_read() -> None:
    of, backend = layer(), CPUBackend(threads=2)
    kv, rows = paged(of, [(0, position, position - 30, position + 1) for position in range(60, 90)], 8)
    qkv = qkv_of(of, 30)
    clean = backend.attend(qkv, of, kv, rows)
    needed = rows.block_tables[0, 30 // 8 : 90 // 8 + 1].tolist()
    for page in set(range(len(kv.keys))) - set(needed):
        kv.keys[page], kv.values[page] = float("nan"), float("nan")
    rows.block_tables[0, :3] = -1_000_000  # the pages of positions below 24 have been freed
    assert torch.equal(backend.attend(qkv, of, kv, rows), clean)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_without_keys_gives_zeros(threads: int) -> None:
    of = layer()
    kv, rows = paged(of, [(0, 5, 0, 6), (1, 0, 0, 0)], 16)
    out = CPUBackend(threads).attend(qkv_of(of, 2), of, kv, rows)
    assert out[0].abs().sum() > 0
    assert not out[1].any()
