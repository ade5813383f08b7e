"""Attention over pages, against the plain version and against itself in other batches, pages and threads."""

import itertools

import pytest
import torch
from tests.kernels.cases import chosen, copied, layer, near, pages, rows

from outrider.layers.attention import AttentionLayer, AttentionRows, PagedKV
from outrider.layers.cpu_ops import NumbaOps
from outrider.layers.ops import TorchOps

PLAIN = TorchOps()
LONG = 700  # more than two blocks of keys


@pytest.fixture(scope="module", params=[1, 2])
def ops(request: pytest.FixtureRequest) -> NumbaOps:
    return NumbaOps(threads=request.param)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _mixed() -> list[tuple[int, int, int, int]]:
    """A prompt chunk, decode rows, a verified draft, windows, a block that sees itself whole."""
    chunk = [(0, position, 0, position + 1) for position in range(40, 75)]
    decodes = [(1, LONG - 1, 0, LONG), (2, 0, 0, 1), (3, 255, 0, 256), (4, 256, 0, 257)]
    draft = [(5, position, 0, position + 1) for position in range(300, 306)]
    windowed = [(6, position, max(0, position - 99), position + 1) for position in range(520, 540)]
    block = [(7, position, 0, 20) for position in range(12, 20)]
    return chunk + decodes + draft + windowed + block


def _qkv(layer: AttentionLayer, count: int) -> torch.Tensor:
    return torch.randn(count, (layer.heads + 2 * layer.kv_heads) * layer.head_dim, generator=_generator())


def _setting(
    layer: AttentionLayer, ranges: list[tuple[int, int, int, int]], page_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[PagedKV, AttentionRows]:
    lines = 1 + max(line for line, *_ in ranges)
    count = lines * (LONG // page_tokens + 1)
    kv = pages(_generator(), layer, pages=count, page_tokens=page_tokens, dtype=dtype)
    return kv, rows(_generator(), ranges, page_tokens=page_tokens, page_count=count)


def _check(ops: NumbaOps, layer: AttentionLayer, page_tokens: int, dtype: torch.dtype = torch.float32) -> None:
    ranges = _mixed()
    kv, step = _setting(layer, ranges, page_tokens, dtype)
    qkv, plain_kv = _qkv(layer, len(ranges)), copied(kv)
    before = qkv.clone()
    fast = ops.attend(qkv, layer, kv, step)
    assert torch.equal(qkv, before)
    plain = PLAIN.attend(qkv, layer, plain_kv, step)
    # A last bit of a key may round to another 16-bit number.
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    assert near(kv.keys, plain_kv.keys, tolerance)
    assert torch.equal(kv.values, plain_kv.values)
    assert near(fast, plain, tolerance)


@pytest.mark.parametrize("page_tokens", [1, 8, 16, 24, 32, 300])
def test_page_sizes(ops: NumbaOps, page_tokens: int) -> None:
    _check(ops, layer(_generator()), page_tokens)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 3), (9, 3), (8, 2), (8, 1), (10, 2), (7, 1)])
def test_heads_that_share_keys(ops: NumbaOps, heads: int, kv_heads: int) -> None:
    _check(ops, layer(_generator(), heads=heads, kv_heads=kv_heads), 16)


@pytest.mark.parametrize("dim", [2, 8, 20, 64, 72, 80, 96, 128, 256])
def test_head_sizes(ops: NumbaOps, dim: int) -> None:
    _check(ops, layer(_generator(), heads=3, kv_heads=1, dim=dim), 16)


@pytest.mark.parametrize("rotary_dim", [2, 16, 24, 62])
@pytest.mark.parametrize("head_norms", [False, True])
def test_partial_rotation_and_head_norms(ops: NumbaOps, rotary_dim: int, head_norms: bool) -> None:
    _check(ops, layer(_generator(), dim=64, rotary_dim=rotary_dim, head_norms=head_norms), 16)


@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (50.0, False), (None, True), (1.5, True)])
def test_softcap_and_sinks(ops: NumbaOps, softcap: float | None, sinks: bool) -> None:
    _check(ops, layer(_generator(), softcap=softcap, sinks=sinks), 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_caches(ops: NumbaOps, dtype: torch.dtype) -> None:
    _check(ops, layer(_generator(), heads=9, kv_heads=3, dim=64), 16, dtype)
    _check(ops, layer(_generator(), heads=9, kv_heads=3, dim=20), 16, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_row_is_the_same_in_every_batch(dtype: torch.dtype, softcap: float | None) -> None:
    settings = layer(_generator(), heads=9, kv_heads=3, dim=64, softcap=softcap, sinks=True)
    ranges = _mixed()
    kv, step = _setting(settings, ranges, 16, dtype)
    qkv = _qkv(settings, len(ranges))
    two, one = NumbaOps(threads=2), NumbaOps(threads=1)
    whole = two.attend(qkv, settings, kv, step)
    assert torch.equal(one.attend(qkv, settings, kv, step), whole)
    count = len(ranges)
    # All keys are written by now, and written again by each batch with the same numbers.
    for size in [*range(1, 34), 50]:
        for first in range(0, count - size + 1, max(1, size)):
            which = list(range(first, first + size))
            assert torch.equal(two.attend(qkv[which], settings, kv, chosen(step, which)), whole[which]), which
    for size, ops in itertools.product((1, 3, 20), (one, two)):
        which = torch.randperm(count, generator=_generator())[:size].tolist()
        assert torch.equal(ops.attend(qkv[which], settings, kv, chosen(step, which)), whole[which])


def test_a_row_is_the_same_whatever_the_page_size() -> None:
    settings, ranges = layer(_generator(), heads=6, kv_heads=2, dim=64), [(0, LONG - 1, 3, LONG)]
    lines = torch.randn(2, LONG, settings.kv_heads, settings.head_dim, generator=_generator())
    qkv, results = _qkv(settings, 1), []
    for page_tokens in (1, 16, 100):
        kv, step = _setting(settings, ranges, page_tokens)
        for position in range(LONG):
            page, offset = int(step.tables[0, position // page_tokens]), position % page_tokens
            kv.keys[page, :, offset], kv.values[page, :, offset] = lines[0, position], lines[1, position]
        results.append(NumbaOps(threads=2).attend(qkv, settings, kv, step))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_what_lies_outside_a_rows_range_is_never_looked_at() -> None:
    settings = layer(_generator())
    ranges = [(0, position, position - 30, position + 1) for position in range(60, 90)]
    kv, step = _setting(settings, ranges, 8)
    qkv = _qkv(settings, len(ranges))
    ops = NumbaOps(threads=2)
    clean = ops.attend(qkv, settings, kv, step)
    for page in range(kv.keys.shape[0]):
        numbers = (step.tables[0] == page).nonzero()
        if len(numbers) and 8 * int(numbers[0]) >= 32 - 8:
            continue  # positions 30 ... 95
        kv.keys[page], kv.values[page] = float("nan"), float("nan")
    step.tables[0, :3] = -1_000_000  # pages of positions below 24 are gone
    assert torch.equal(ops.attend(qkv, settings, kv, step), clean)


def test_a_row_without_keys_gives_zeros(ops: NumbaOps) -> None:
    settings = layer(_generator())
    kv, step = _setting(settings, [(0, 5, 0, 6), (1, 0, 0, 0)], 16)
    out = ops.attend(_qkv(settings, 2), settings, kv, step)
    assert out[0].abs().sum() > 0
    assert not out[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_norms", [False, True])
def test_keys_and_values_alone_are_stored_as_attention_stores_them(
    ops: NumbaOps, dtype: torch.dtype, head_norms: bool
) -> None:
    of = layer(_generator(), head_norms=head_norms)
    kv = pages(_generator(), of, pages=9, page_tokens=4, dtype=dtype)
    places = rows(_generator(), [(0, 5, 0, 6), (0, 6, 0, 7), (1, 3, 0, 4), (1, 4, 0, 5)], page_tokens=4, page_count=9)
    qkv, pair = _qkv(of, 4), 2 * of.kv_heads * of.head_dim
    stored, attended, plain = copied(kv), copied(kv), copied(kv)
    # A part of wider rows, as a drafter has it.
    ops.store(qkv[:, -pair:], of, stored, places)
    ops.attend(qkv, of, attended, places)
    PLAIN.store(qkv[:, -pair:], of, plain, places)
    assert torch.equal(stored.keys, attended.keys)
    assert torch.equal(stored.values, attended.values)
    assert near(stored.keys, plain.keys, 1e-2 if dtype == torch.bfloat16 else 2e-5)
    assert torch.equal(stored.values, plain.values)
    assert not torch.equal(stored.keys, kv.keys)
