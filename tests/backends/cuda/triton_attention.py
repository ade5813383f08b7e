"""Attention over pages against the reference, on random ragged batches: on a GPU, or on Triton's interpreter."""

from __future__ import annotations

import random as stdlib_random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.backends.cases import LONG, Range, chosen, layer, metadata, moved, near, paged, random
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.cuda.kernels.attention import SEGMENT_MIN, AttentionWorkspace, attend
from outrider.backends.cuda.kernels.rotate import rotate
from outrider.backends.reference.backend import ReferenceBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = ReferenceBackend()
GUARD = 7.0


def random_ranges(rng: stdlib_random.Random) -> list[Range]:
    """Returns the rows of a ragged batch: prompt chunks, decoded rows, verified drafts, and blocks of every kind."""
    ranges: list[Range] = []
    for table_row in range(rng.choice((1, 2, 4, 7))):
        count = rng.choice((1, 1, 1, 2, 5, 8, 17, 40))
        start = rng.choice((0, rng.randrange(20), rng.randrange(LONG - 60), SEGMENT_MIN - count // 2))
        window, end = rng.choice((LONG, LONG, 3, 50, 150)), start + count
        kind = rng.choice(("causal", "causal", "both ways", "anchored", "anchored, both ways", "no keys"))
        for position in range(start, end):
            at = start if kind.startswith("anchored") else position
            stop = end if kind.endswith("both ways") else position + 1
            first = max(0, at - window + 1)
            ranges.append((table_row, position, first, first if kind == "no keys" else stop))
    return ranges


def attended(
    qkv: Tensor,
    of: AttentionLayer,
    kv: PagedKV,
    rows: AttentionMetadata,
    *,
    splits: int | None = None,
    block: int | None = None,
    span_rows: int | None = None,
    uniform: int = 0,
) -> Tensor:
    """Runs both kernels, with memory around their outputs that must stay as it is."""
    width = of.heads * of.head_dim
    outputs = []
    for _ in range(2):
        whole = torch.full((len(qkv) + 2, width + 6), GUARD, dtype=qkv.dtype, device=qkv.device)
        outputs.append((whole, whole[1:-1, 3:-3]))
    (queries_whole, queries), (out_whole, out) = outputs
    before = kv.keys.clone(), kv.values.clone()
    rotate(qkv, of, kv, rows, queries)
    workspace = AttentionWorkspace(qkv.device)
    more = {"splits": splits, "block": block, "span_rows": span_rows, "uniform": uniform}
    attend(queries, of, kv, rows, out, workspace, **more)  # type: ignore[arg-type]
    for whole in (queries_whole, out_whole):
        assert (whole[0] == GUARD).all()
        assert (whole[-1] == GUARD).all()
        assert (whole[:, :3] == GUARD).all()
        assert (whole[:, -3:] == GUARD).all()
    tokens = kv.page_tokens
    page, offset = rows.slot_mapping // tokens, rows.slot_mapping % tokens
    for was, now in zip(before, (kv.keys, kv.values), strict=True):
        was[page, :, offset] = now[page, :, offset]
        assert torch.equal(was, now)
    assert not workspace.at_least(0, 0, 0)[2].any()
    return out


def random_case(seed: int, dtype: torch.dtype) -> tuple[AttentionLayer, PagedKV, AttentionMetadata, Tensor]:
    rng = stdlib_random.Random(seed)
    heads, kv_heads = rng.choice(((3, 3), (9, 3), (8, 1), (4, 2), (7, 1)))
    dim = rng.choice((16, 20, 64, 80))
    of = layer(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        rotary_dim=rng.choice((dim, dim // 2)),
        head_norms=rng.random() < 0.5,
        softcap=rng.choice((None, None, 2.0, 30.0)),
        sinks=rng.random() < 0.3,
    )
    kv, rows = paged(of, random_ranges(rng), rng.choice((1, 5, 16, 48)), dtype)
    qkv = random(seed, len(rows.positions), (heads + 2 * kv_heads) * dim).to(dtype)
    return of, kv, rows, qkv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(16))
def test_random_batches_are_attended_as_by_the_reference(seed: int, dtype: torch.dtype) -> None:
    of, kv, rows, qkv = random_case(seed, dtype)
    wide = PagedKV(keys=kv.keys.float(), values=kv.values.float())
    expected = REFERENCE.attend(qkv.float(), of, wide, rows)
    reads = rows.stop_key > rows.first_key
    there = [moved(each, DEVICE) for each in (of, kv, rows, qkv)]
    splits = stdlib_random.Random(seed).choice((None, 1, 2, 8))
    found = attended(there[3], there[0], there[1], there[2], splits=splits)  # type: ignore[arg-type]
    tolerance = 2e-5 if dtype is torch.float32 else 4e-3
    if reads.any():
        assert near(found[reads], expected[reads], tolerance)
    # A row of a captured pass's padding reads nothing, and must not become NaN.
    if of.sinks is None:
        assert not found[~reads].any()
    assert near(there[1].keys, wide.keys, tolerance)  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
def test_splitting_the_keys_changes_no_bit(seed: int) -> None:
    of, kv, rows, qkv = (moved(each, DEVICE) for each in random_case(100 + seed, torch.float32))
    whole = attended(qkv, of, kv, rows, splits=1)
    for splits in (2, 4, 16):
        assert torch.equal(attended(qkv, of, kv, rows, splits=splits), whole)


def dot_in_fixed_order(_builder: Any, a: Any, b: Any, d: Any, *_more: Any) -> TensorHandle:
    """A product as the GPU's matrix instructions sum it: in an order that does not depend on the number of rows. The
    order of NumPy's matmul does."""
    products = a.data[:, :, None].astype(d.data.dtype) * b.data[None].astype(d.data.dtype)
    return TensorHandle(products.cumsum(axis=1)[:, -1] + d.data, d.dtype.scalar)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("place", [5, 130, 400])
def test_a_row_among_verified_drafts_has_the_bits_of_one_that_is_decoded_alone(
    place: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_in_fixed_order)
    of = layer(heads=6, kv_heads=2, dim=32)
    kv, rows = paged(of, [(0, position, 0, position + 1) for position in range(place, place + 5)], 16, dtype)
    qkv = random(3, 5, 10 * 32).to(dtype)
    of, kv, rows, qkv = (moved(each, DEVICE) for each in (of, kv, rows, qkv))
    together = attended(qkv, of, kv, rows, uniform=5, span_rows=5)
    for row in range(5):
        alone = moved(chosen(moved(rows, torch.device("cpu")), [row], 16), DEVICE)
        for splits in (1, 4):
            found = attended(qkv[row : row + 1], of, kv, alone, splits=splits, uniform=1)
            assert torch.equal(found, together[row : row + 1])


def test_spans_without_rows_and_rows_of_the_padding_are_skipped() -> None:
    of, ranges = layer(), [(0, 3, 0, 4), (0, 4, 0, 5), (1, 9, 0, 10)]
    kv, rows = paged(of, ranges, 8)
    qkv = random(3, 6, 10 * 32)
    expected = REFERENCE.attend(qkv[:3], of, moved(kv, torch.device("cpu")), rows)
    table = rows.block_tables
    more = metadata([*ranges, *[(0, 0, 0, 0)] * 3], table, 8)
    padded = replace(more, slot_mapping=more.slot_mapping.clone(), query_start_loc=torch.tensor([0, 2, 3, 3, 3]))
    padded.slot_mapping[3:] = 0
    there = [moved(each, DEVICE) for each in (of, kv, padded, qkv)]
    found = attended(there[3], there[0], there[1], there[2], span_rows=2)[:3]  # type: ignore[arg-type]
    assert near(found, expected)
