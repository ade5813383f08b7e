"""Pages that no later step will ask for come back at the commit."""

from __future__ import annotations

import pytest
from tests.kv.fakes import Hand, drafter, full, ids, make_manager

from outrider.kv.intervals import page_count


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("accepted", [0, 1, 5])
def test_a_request_that_lost_its_drafter_gives_back_what_its_drafts_reserved(size: int, accepted: int) -> None:
    k = 6
    hand = Hand(make_manager(full(page=size), footprint=drafter("chain_from_taps", page=size), pages=400))
    sequence = hand.prefill(ids(9), k=k)
    end = sequence.committed + 1 + k
    hand.kv.reserve(sequence, end, hand.kv.layout.footprint.reserve_end(v=end, k=k))
    assert len(sequence.groups[0].pages) == page_count(end, size)
    hand.kv.drop_draft(sequence)
    plan = hand.plan()
    sequence.tokens.extend(range(1 + accepted))
    v = sequence.committed + 1 + accepted
    hand.kv.commit(sequence, v)
    hand.done(plan)
    assert len(sequence.groups[0].pages) == min(page_count(end, size), page_count(v + 1, size))
    hand.kv.check_integrity()


def test_a_request_that_drafts_keeps_what_its_next_step_asks_for() -> None:
    k = 6
    hand = Hand(make_manager(full(page=1), footprint=drafter("chain_from_taps", page=1), pages=400))
    sequence = hand.prefill(ids(9), k=k)
    end = sequence.committed + 1 + k
    hand.kv.reserve(sequence, end, hand.kv.layout.footprint.reserve_end(v=end, k=k))
    sequence.tokens.append(1)
    hand.kv.commit(sequence, sequence.committed + 1)
    assert len(sequence.groups[0].pages) == end


@pytest.mark.parametrize("fork", [False, True])
def test_a_request_let_in_without_its_drafter_keeps_no_pages_for_drafts(fork: bool) -> None:
    """What it reserved for a chunk that then found fewer rows comes back, and so it does for its forks."""
    hand = Hand(make_manager(full(page=2), footprint=drafter("chain_from_taps", page=2), pages=400))
    sequence = hand.prefill(ids(8), k=6, may_draft=False)
    if fork:
        child = hand.open([*ids(8), 1], k=6)
        hand.kv.fork(sequence, child)
        sequence = child
    hand.kv.reserve(sequence, 13, 0)
    assert len(sequence.groups[0].pages) == 7
    plan = hand.plan()
    sequence.tokens.extend((1, 2))
    hand.kv.commit(sequence, 9)
    hand.done(plan)
    assert len(sequence.groups[0].pages) == page_count(9 + 1, 2)


def test_a_drafter_without_kv_keeps_pages_for_what_it_looks_up() -> None:
    hand = Hand(make_manager(full(page=2), footprint=drafter("lookup"), pages=400))
    sequence = hand.prefill(ids(8), k=6)
    hand.kv.reserve(sequence, 15, 0)
    sequence.tokens.append(1)
    hand.kv.commit(sequence, 9)
    assert len(sequence.groups[0].pages) == page_count(15, 2)
