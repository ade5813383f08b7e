"""Publishing with and without an observer must leave the same index: the shortcuts are only shortcuts."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from outrider.kv import Full, GroupSpec, KVConfig, KVLayout, KVManager, Sliding
from outrider.kv.archetypes import DrafterShape, chain_from_taps
from outrider.kv.observer import KVObserver


def managers() -> tuple[KVManager, KVManager]:
    draft = GroupSpec(name="draft", kind=Full(), page_tokens=2, slot_bytes=3)
    layout = KVLayout(
        target=(
            GroupSpec(name="full", kind=Full(), page_tokens=4),
            GroupSpec(name="sliding", kind=Sliding(window=3), page_tokens=2, slot_bytes=5),
        ),
        footprint=chain_from_taps("drafter", DrafterShape(groups=(draft,), taps=(1,))),
    )
    config = KVConfig(arena_pages=(300,) * len(layout.arena_page_bytes), step_tokens=256, max_model_len=512)
    return KVManager(layout, config), KVManager(layout, config, observer=KVObserver())


@pytest.mark.parametrize("seed", range(6))
def test_the_index_is_the_same_with_and_without_an_observer(seed: int) -> None:
    """One page at a time, many at once, siblings, evictions: both managers do the same."""
    rng = Random(seed)
    plain, watched = managers()
    stem = [rng.randrange(4) for _ in range(120)]
    for number in range(25):
        prompt = stem[: rng.randrange(1, 120)] + [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        total, hits = len(prompt) + 20, []
        chunks = [rng.choice((1, 3, 9, 200)) for _ in range(200)]
        for kv in (plain, watched):
            tokens = array("I", prompt)
            sequence = kv.open(str(number), tokens, total_tokens=total)
            hits.append(kv.admit(sequence).hit)
            end = sequence.committed
            for chunk in chunks:
                end = min(end + chunk, total - 1)
                kv.reserve(sequence, end, end)
                tokens.extend(range(len(tokens), end + 1))
                kv.commit(sequence, end)
            kv.close(sequence)
            kv.check_integrity()
        assert hits[0] == hits[1]
        assert [index.pages for index in plain.pool.indexes] == [index.pages for index in watched.pool.indexes]
