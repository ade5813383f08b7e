"""Publishing with and without an observer must leave the same index: the shortcuts are only shortcuts."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from outrider.kv import Full, GroupSpec, KVConfig, KVLayout, KVManager, Sliding
from outrider.kv.observer import KVObserver
from outrider.speculative.footprints import DrafterShape, footprint_for


def managers() -> tuple[KVManager, KVManager]:
    draft = GroupSpec(name="draft", kind=Full(), page_tokens=2, slot_bytes=3)
    layout = KVLayout(
        target=(
            GroupSpec(name="full", kind=Full(), page_tokens=4),
            GroupSpec(name="sliding", kind=Sliding(window=3), page_tokens=2, slot_bytes=5),
        ),
        footprint=footprint_for("eagle", DrafterShape(groups=(draft,), taps=(1,))),
    )
    config = KVConfig(arena_pages=(300,) * len(layout.arena_page_bytes), step_tokens=256, max_model_len=512)
    return KVManager(layout, config), KVManager(layout, config, observer=KVObserver())


@pytest.mark.parametrize("seed", range(6))
def test_the_index_is_the_same_whether_somebody_watches_or_not(seed: int) -> None:
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


def test_pages_are_found_up_to_the_first_one_that_is_gone() -> None:
    plain, _watched = managers()
    tokens = array("I", range(1, 200))
    sequence = plain.open("a", tokens, total_tokens=240)
    plain.admit(sequence)
    plain.reserve(sequence, 198, 198)
    plain.commit(sequence, 198)
    plain.close(sequence)
    pages = 198 // 4
    again = plain.open("b", array("I", tokens), total_tokens=240)
    hit, views = plain.search(again, 198, draft=True)
    assert hit.end >= 196
    assert views[0].whole[:pages] == [plain.pool.indexes[0].pages[views[0].key(n) or b""] for n in range(pages)]
    for gone in (40, 17, 16, 1, 0):
        plain.pool.indexes[0].remove([views[0].whole[gone]])
        hit, _views = plain.search(again, 198, draft=False)
        assert hit.end == gone * 4
