"""Layers in groups: pages of equal bytes, little unused, and boundaries that stay near each other."""

from math import lcm

import pytest
from tests.engine.tiny import tiny_spec

from outrider.kv import KVLayout
from outrider.models.kv_groups import MOST_ALIGNED, MOST_UNUSED, LayerGroups, blocks_per_page, layer_groups


def groups_of(*windows: int | None, one_arena: bool = True) -> LayerGroups:
    return layer_groups(tiny_spec(windows=windows), owner="target", page_tokens=16, item_bytes=4, one_arena=one_arena)


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [
        ((30,), (1,)),
        ((15, 3), (1, 5)),
        ((3, 15), (5, 1)),
        ((12, 12), (1, 1)),
        ((22, 4), (1, 6)),
        ((29, 5), (1, 6)),
        ((52, 10), (1, 5)),
        ((3, 2), (2, 3)),
    ],
)
def test_pages_of_fewer_layers_are_longer(layers: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    assert blocks_per_page(layers) == blocks


def test_any_two_groups_share_an_arena_with_little_unused_or_have_their_own() -> None:
    shared = 0
    for most in range(1, 60):
        for fewer in range(1, most + 1):
            blocks = blocks_per_page((most, fewer))
            sizes = (most * blocks[0], fewer * blocks[1])
            if blocks == (1, 1):
                continue
            shared += 1
            assert 1 - min(sizes) / max(sizes) <= MOST_UNUSED
            assert lcm(*blocks) <= MOST_ALIGNED * min(blocks)
    assert shared > 500


def test_a_model_with_windows_has_one_arena() -> None:
    groups = groups_of(*(8, 8, 8, 8, 8, None) * 3)
    layout = KVLayout(target=groups.specs)
    assert [(spec.name, spec.page_tokens) for spec in groups.specs] == [("target.window8", 16), ("target.full", 80)]
    assert layout.arena_of == (0, 0)
    assert [spec.unused_bytes for spec in groups.specs] == [0, 0]
    assert layout.alignment == 80


def test_what_does_not_divide_is_left_unused_at_the_end_of_pages() -> None:
    groups = groups_of(*(8,) * 22, *(None,) * 4)
    layout = KVLayout(target=groups.specs)
    window, full = groups.specs
    assert (window.page_tokens, full.page_tokens) == (16, 96)
    assert window.page_bytes == full.page_bytes == full.page_tokens * full.slot_bytes
    assert window.unused_bytes == window.page_bytes - 16 * window.slot_bytes
    assert len(layout.arena_page_bytes) == 1


def test_layers_that_are_too_few_to_share_have_an_arena_of_their_own() -> None:
    groups = groups_of(*(8,) * 30, None)
    assert [spec.page_tokens for spec in groups.specs] == [16, 16]
    assert len(KVLayout(target=groups.specs).arena_page_bytes) == 2


def test_drafters_have_pages_of_one_length() -> None:
    """A page longer than the target's alignment could not end where a hit does, and a hit would lose its drafter."""
    groups = groups_of(8, 8, None, one_arena=False)
    assert [spec.page_tokens for spec in groups.specs] == [16, 16]
    assert all(spec.unused_bytes == 0 for spec in groups.specs)
