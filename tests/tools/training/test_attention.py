"""A block sees the context before its anchor, and itself; nothing else, in any of the ways it is computed."""

from __future__ import annotations

import pytest
import torch
from tests.tools.training.tiny import lanes_of, plan_of, settings_for, tiny_target, write_corpus
from torch import Tensor

from outrider.tools.training.attention import TILE, BlockLayout, BlockMasks, attend, dense_mask
from outrider.tools.training.networks import block_layout


def brute_force(layout: BlockLayout, anchors: Tensor) -> Tensor:
    seen = torch.zeros(len(anchors), 1, layout.rows, layout.keys, dtype=torch.bool)
    for stream, row_anchors in enumerate(anchors.tolist()):
        for row in range(layout.rows):
            block, place = divmod(row, layout.block_size)
            for position in range(row_anchors[block]):
                seen[stream, 0, row, position] = True
            for other in range(place + 1 if layout.causal else layout.block_size):
                seen[stream, 0, row, layout.length + block * layout.block_size + other] = True
    return seen


def some_anchors(streams: int, layout: BlockLayout) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randperm(layout.length - 1, generator=generator)[: layout.anchors] + 1 for _ in range(streams)]
    return torch.stack(drawn).sort(dim=1).values


@pytest.mark.parametrize("causal", [False, True])
def test_the_mask_is_what_the_loops_say(causal: bool) -> None:
    layout = BlockLayout(length=11, anchors=4, block_size=3, causal=causal)
    anchors = some_anchors(3, layout)
    expected = brute_force(layout, anchors)
    assert torch.equal(dense_mask(layout, anchors), expected)
    # The function that the other kernel evaluates says the same of every pair.
    masks = BlockMasks(layout, 3, torch.device("cpu"), flex=True)
    masks.anchors.copy_(anchors)
    stream, _, row, key = torch.meshgrid(*(torch.arange(size) for size in expected.shape), indexing="ij")
    assert torch.equal(masks._sees(stream, _, row, key), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_hold_every_pair_that_is_seen(causal: bool) -> None:
    layout = BlockLayout(length=2 * TILE, anchors=TILE // 4, block_size=8, causal=causal)
    anchors = some_anchors(2, layout)
    expected = dense_mask(layout, anchors)
    mask = BlockMasks(layout, 2, torch.device("cpu"), flex=True).make(anchors)
    assert not isinstance(mask, Tensor)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for stream in range(2):
        for tile in range(layout.rows // TILE):
            listed = torch.zeros(TILE, layout.keys, dtype=torch.bool)
            rows = expected[stream, 0, tile * TILE : (tile + 1) * TILE]
            whole = mask.full_kv_indices[stream, 0, tile, : mask.full_kv_num_blocks[stream, 0, tile]]
            partial = mask.kv_indices[stream, 0, tile, : mask.kv_num_blocks[stream, 0, tile]]
            assert not set(whole.tolist()) & set(partial.tolist())
            for number in [*whole.tolist(), *partial.tolist()]:
                listed[:, number * TILE : (number + 1) * TILE] = True
            for number in whole.tolist():
                assert rows[:, number * TILE : (number + 1) * TILE].all()
            assert not (rows & ~listed).any()


def test_masked_attention_is_softmax_over_what_is_seen() -> None:
    layout = BlockLayout(length=7, anchors=2, block_size=3, causal=False)
    anchors = some_anchors(1, layout)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, layout.rows, 4, 8, generator=generator)
    k, v = (torch.randn(1, layout.keys, 2, 8, generator=generator) for _ in range(2))
    found = attend(q, k, v, dense_mask(layout, anchors)).view(layout.rows, 4, 8)
    seen = brute_force(layout, anchors)[0, 0]
    for row in range(layout.rows):
        for head in range(4):
            keys, values = k[0, seen[row], head // 2], v[0, seen[row], head // 2]
            shares = torch.softmax(keys @ q[0, row, head] * 8**-0.5, dim=0)
            torch.testing.assert_close(found[row, head], shares @ values, rtol=1e-4, atol=1e-5)


# ---- the whole network: what a draft's row depends on --------------------------------------------------


def dependence(rows: Tensor, inputs: Tensor) -> set[int]:
    """Positions of the (only) stream that change these rows at all."""
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(rows.shape, generator=generator)
    (gradient,) = torch.autograd.grad((rows * weights).sum(), inputs, retain_graph=True, allow_unused=True)
    return set() if gradient is None else set(gradient[0].abs().sum(-1).nonzero().flatten().tolist())


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_a_draft_depends_on_nothing_at_or_behind_its_anchor(
    method: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("run")
    write_corpus(directory / "corpus", 4)
    settings = settings_for(directory, method, anchors=3, batch_streams=1)
    (lane,) = lanes_of(settings)
    plan = plan_of(settings, [lane])
    network = plan.network
    network.initialise_on(torch.device("cpu"), 0)
    length = lane.length
    anchors = torch.tensor([[5, 6, 20]])
    layout = block_layout(network, length=length, anchors=3, k=settings.k, causal=False)
    mask = None if layout is None else dense_mask(layout, anchors)
    generator = torch.Generator().manual_seed(1)
    hidden = tiny_target().spec.hidden_size
    taps = torch.randn(1, length, hidden * len(plan.taps), generator=generator, requires_grad=True)
    embedded = torch.randn(1, length, hidden, generator=generator, requires_grad=True)
    rows = network(taps, embedded, anchors, mask, settings.k)
    assert rows.shape == (1, 3, settings.k, hidden)
    for number, anchor in enumerate(anchors[0].tolist()):
        for draft in range(settings.k):
            row = rows[0, number, draft]
            assert dependence(row, taps) == set(range(anchor))
            # One reads the newest token; the other all that came before, and the drafts that led here.
            read = {anchor} if method == "dflash" else set(range(1, anchor + draft + 1))
            assert dependence(row, embedded) == read
