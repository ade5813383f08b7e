"""The memory of the KV cache."""

from __future__ import annotations

from pathlib import Path
from resource import getpagesize

import pytest
import torch

from outrider.backends.cpu.backend import CPUBackend
from outrider.errors import ConfigError
from outrider.kv import Full, GroupSpec, KVLayout
from outrider.models.kv_groups import LayerGroups
from outrider.runner.page_store import PageStore

HEADS, HEAD_DIM, PAGE_TOKENS = 2, 64, 16


def store_of(pages: int) -> tuple[PageStore, LayerGroups]:
    spec = GroupSpec(name="full", kind=Full(), page_tokens=PAGE_TOKENS, slot_bytes=2 * HEADS * HEAD_DIM * 4)
    owner = LayerGroups(specs=(spec,), place=((0, 0),), layers_in=(1,), kv_heads=HEADS, head_dim=HEAD_DIM)
    layout = KVLayout(target=(spec,))
    return PageStore(layout, (pages,), (owner,), dtype=torch.float32, backend=CPUBackend(1)), owner


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


def test_memory_is_taken_when_it_is_written() -> None:
    """A cache is as large as its budget, and most of it may never be used."""
    store_of(pages=4)  # kernels may have to be compiled, which takes memory too
    before = resident_bytes()
    store, owner = store_of(pages=1 << 16)
    (layer,) = store.layers(owner, 0)
    assert layer.keys.nbytes + layer.values.nbytes == 1 << 30
    assert resident_bytes() - before < 1 << 26
    layer.keys[1 : 1 << 12] = 1.0
    assert resident_bytes() - before > 1 << 24
    # Pages that were not written are zero: a padded row may read them.
    assert not layer.keys[0].any()
    assert not layer.values[-1].any()


def test_an_arena_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pages of 16,384 bytes .* lower kv_cache_memory_bytes"):
        store_of(pages=1 << 40)
