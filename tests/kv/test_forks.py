"""A fork counts only on what its parent still holds, whatever left the parent's windows before."""

from __future__ import annotations

import pytest
from tests.kv.fakes import OTHER, Hand, drafter, full, ids, make_manager, sliding

from outrider.kv.pages import NULL_PAGE


@pytest.mark.parametrize("window", [1, 2, 3, 9])
@pytest.mark.parametrize("length", [15, 16, 17, 24])
def test_a_fork_shares_and_copies_nothing_that_left_the_parents_window(window: int, length: int) -> None:
    hand = Hand(make_manager(full(page=8), footprint=drafter("chain_from_taps", sliding(window, "draft", page=8))))
    parent = hand.prefill(ids(length))  # commits without keeping the window for forks
    child = hand.open([*ids(length), OTHER])
    hand.kv.fork(parent, child)
    plan = hand.plan()
    assert NULL_PAGE not in [page for copy in plan.copies for page in (copy.source, copy.destination)]
    low, table = hand.tables.low(child.id, 1), hand.tables.table(child.id, 1)
    assert NULL_PAGE not in table[low // 8 : -(-child.draft_end // 8)]
    assert low >= parent.groups[1].held_from(8) or low == child.draft_end
    hand.done(plan)
    hand.kv.check_integrity()
