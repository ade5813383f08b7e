"""The manager: what a step holds, what comes back and when, and what is refused at the door."""

from __future__ import annotations

from array import array

import pytest
from tests.kv.fakes import (
    ARCHETYPES_WITH_KV,
    OTHER,
    Hand,
    available,
    drafter,
    full,
    held_pages,
    ids,
    make_manager,
    sliding,
    watched,
)

from outrider.errors import AdmissionError, OutOfPages
from outrider.kv import KVManager
from outrider.kv.intervals import page_count
from outrider.kv.ledger import SequenceKV
from outrider.kv.pages import NULL_PAGE
from outrider.kv.plan import PageCopy
from outrider.kv.sizing import worst_case_pages


def snapshot(kv: KVManager, sequence: SequenceKV) -> object:
    groups = [(list(s.pages), s.first_page, s.low, s.published) for s in sequence.groups]
    return groups, available(kv), [list(arena.refs) for arena in kv.pool.arenas]


# ---- windows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("archetype", ["nothing", "chain_from_tokens", "chain_from_taps", "block_from_taps"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_each_page_is_published_and_freed_by_the_very_commit_that_allows_it(
    archetype: str, order: tuple[int, ...]
) -> None:
    groups = [full("f", page=4), sliding(6, "a", page=4), sliding(11, "b", page=4, slot_bytes=2)]
    hand, watch = watched(*(groups[place] for place in order), footprint=drafter(archetype, page=4))
    kv = hand.kv
    sequence = hand.prefill(ids(5))
    for token in range(40):
        hand.decode(sequence, [token])
        v = sequence.committed
        for g, spec in enumerate(kv.layout.groups):
            end = v if g < kv.layout.num_target else kv.layout.footprint.durable_end(v)
            assert watch.numbers(sequence, g) == list(range(end // 4)), (v, spec.name)
            assert sequence.groups[g].first_page == spec.kind.needed(v).start // 4, (v, spec.name)


def test_a_window_page_that_left_is_still_in_the_index() -> None:
    hand = Hand(make_manager(sliding(4, page=4)))
    sequence = hand.prefill(ids(40))
    assert len(hand.kv.pool.indexes[0]) == 10
    assert hand.kv.pool.arenas[0].num_cached == 9
    hand.kv.close(sequence)
    hand.settle()
    assert hand.admit(ids(24) + ids(5, seed=2)).hit == 24


# ---- reservation ---------------------------------------------------------------------------------------


def test_a_reservation_that_fails_in_one_arena_takes_nothing_from_the_other() -> None:
    hand = Hand(make_manager(full("a", page=8), full("b", page=8, slot_bytes=2), pages=(32, 6)))
    kv = hand.kv
    holder = hand.admit(ids(24), total=32)
    kv.reserve(holder, 24, 0)
    sequence = hand.admit(ids(24, seed=1), total=32)
    kv.reserve(sequence, 8, 0)
    before = snapshot(kv, sequence)
    with pytest.raises(OutOfPages) as shortage:
        kv.reserve(sequence, 32, 0)
    assert (shortage.value.arena, shortage.value.missing_pages) == (1, 1)
    assert snapshot(kv, sequence) == before
    kv.reserve(sequence, 24, 0)
    kv.check_integrity()


def test_groups_of_one_arena_are_counted_together() -> None:
    hand = Hand(make_manager(full("a", page=8), full("b", page=8), pages=9))
    sequence = hand.admit(ids(20), total=24)
    kv = hand.kv
    taken = kv.pool.acquire(0, 4)
    before = snapshot(kv, sequence)
    with pytest.raises(OutOfPages) as shortage:
        kv.reserve(sequence, 24, 0)
    assert shortage.value.missing_pages == 1
    assert snapshot(kv, sequence) == before
    kv.pool.release(0, taken)
    kv.reserve(sequence, 24, 0)


@pytest.mark.parametrize("slot_bytes", [1, 2], ids=["one arena", "two arenas"])
@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
def test_a_shortage_of_draft_pages_drops_the_drafter_and_never_raises(archetype: str, slot_bytes: int) -> None:
    hand = Hand(make_manager(full(page=8), footprint=drafter(archetype, slot_bytes=slot_bytes), pages=8))
    kv = hand.kv
    sequence = hand.prefill(ids(16), total=32)
    target = held_pages(kv, sequence, 0)
    draft = sequence.groups[1].held()
    taken = kv.pool.acquire(1, kv.pool.arena(1).num_available - (1 if slot_bytes == 1 else 0))
    kv.reserve(sequence, 17, kv.layout.footprint.reserve_end(v=17, k=12))
    assert not sequence.drafting
    assert kv.dropped_drafts == 1
    assert {n: page for n, page in held_pages(kv, sequence, 0).items() if n in target} == target
    assert sorted(held_pages(kv, sequence, 0)) == [0, 1, 2]
    assert sequence.groups[1].held() == []
    if slot_bytes == 2:
        assert all(kv.pool.arena(1).refs[page] == 0 for page in draft)
    kv.pool.release(1, taken)
    kv.check_integrity()
    # Target work goes on; it comes back with the drafter once admitted again.
    hand.decode(sequence, range(4))
    kv.release(sequence)
    kv.admit(sequence)
    assert sequence.drafting


def test_a_draft_hit_that_does_not_fit_is_dropped_and_the_target_hit_stays() -> None:
    """The draft group would need a page to copy into, and there is none."""
    hand = Hand(make_manager(full(page=8), footprint=drafter("chain_from_taps", slot_bytes=2), pages=(16, 4)))
    kv = hand.kv
    hand.serve(ids(32), total=32)
    held = kv.pool.acquire(1, 1)
    kv.pool.retain(1, list(kv.pool.indexes[1].pages.values()))
    sequence = hand.admit(ids(24) + ids(5, seed=1), total=40)
    assert sequence.hit == 24
    assert not sequence.drafting
    assert held
    # Only references taken by this test are left.
    assert sum(kv.pool.arena(1).refs) - 1 == 1 + len(kv.pool.indexes[1])


def test_admission_that_finds_no_page_for_its_copy_holds_nothing() -> None:
    hand = Hand(make_manager(full(page=8), pages=4))
    kv = hand.kv
    hand.serve(ids(24), total=24)
    pinned = list(kv.pool.indexes[0].pages.values())
    kv.pool.retain(0, pinned)
    taken = kv.pool.acquire(0, 1)
    sequence = hand.open(ids(20) + ids(2, seed=1), total=24)
    with pytest.raises(OutOfPages):
        kv.admit(sequence)
    assert not sequence.admitted
    assert [kv.pool.arenas[0].refs[page] for page in pinned] == [1, 1, 1]
    kv.pool.release(0, [*taken, *pinned])
    kv.check_integrity()
    assert kv.admit(sequence).hit == 20


# ---- forks ---------------------------------------------------------------------------------------------


def fork_at(hand: Hand, parent: SequenceKV, end: int, token: int) -> SequenceKV:
    child = hand.open(array("I", [*parent.tokens[:end], token]), total=end + 32)
    hand.kv.fork(parent, child)
    return child


@pytest.mark.parametrize("archetype", ["nothing", "chain_from_tokens", "chain_from_taps", "block_from_taps"])
@pytest.mark.parametrize("length", [15, 16, 17, 20, 23, 24])
def test_a_fork_shares_whole_pages_and_copies_the_one_both_would_write(archetype: str, length: int) -> None:
    hand = Hand(make_manager(full(page=8), footprint=drafter(archetype)))
    kv = hand.kv
    reach = kv.layout.footprint.token_reach
    parent = hand.prefill(ids(length))
    child = fork_at(hand, parent, length, OTHER)
    assert child.committed == length
    copies = {copy.group: copy for copy in hand.plan().copies}
    for g in range(len(kv.layout.groups)):
        end = length if g == 0 else length - reach
        mine, theirs = held_pages(kv, child, g), held_pages(kv, parent, g)
        assert sorted(mine) == list(range(page_count(end, 8)))
        for number in mine:
            whole = (number + 1) * 8 <= end
            assert (mine[number] == theirs[number]) == whole
            assert kv.pool.arena(g).refs[mine[number]] == (2 if whole else 1)
        if end % 8:
            assert copies[g] == PageCopy(g, theirs[end // 8], mine[end // 8], 0, end % 8)
        else:
            assert g not in copies
    if child.drafting:
        assert child.draft_end == length - reach
    kv.check_integrity()


@pytest.mark.parametrize("length", [20, 22, 24])
def test_a_fork_below_a_gap_publishes_no_page_that_the_gap_reaches_into(length: int) -> None:
    """Draft slots below `low` were never written: not in the parent, so not in its forks."""
    hand, watch = watched(full(page=8), footprint=drafter("block_from_taps"))
    hand.serve(ids(40), may_draft=False)
    parent = hand.prefill(ids(21))
    assert parent.groups[1].low == 20
    hand.decode(parent, range(length - 21))
    child = fork_at(hand, parent, parent.committed, OTHER)
    # Nor are they copied.
    copied = [(copy.first, copy.stop) for copy in hand.settle().copies if copy.group == 1]
    assert copied == ([(4, parent.committed - 16)] if parent.committed % 8 else [])
    hand.decode(child, range(12))
    assert child.groups[1].low == 20
    assert 2 not in watch.numbers(child, 1)
    assert 3 in watch.numbers(child, 1)


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("length", [15, 16, 17, 23, 24, 25])
def test_tap_rows_of_a_fork_find_the_window_that_they_read(window: int, length: int) -> None:
    hand = Hand(make_manager(sliding(window, page=8), footprint=drafter("chain_from_taps")))
    kv = hand.kv
    parent = hand.admit(ids(length))
    parent.tokens.append(1)
    kv.reserve(parent, length, length)
    hand.settle()
    kv.commit(parent, length, keep_window=True)
    child = fork_at(hand, parent, length, OTHER)
    hand.plan()
    assert child.draft_end == length - 1
    first = max(0, length - 1 - window + 1)
    assert NULL_PAGE not in hand.tables.table(child.id, 0)[first // 8 : page_count(length, 8)]


def test_a_fork_without_room_for_its_draft_pages_goes_on_without_a_drafter() -> None:
    hand = Hand(make_manager(full(page=8), footprint=drafter("block_from_taps", slot_bytes=2), pages=(16, 4)))
    parent = hand.prefill(ids(20), total=24)
    taken = hand.kv.pool.acquire(1, 1)
    child = fork_at(hand, parent, 20, OTHER)
    assert child.committed == 20
    assert not child.drafting
    assert parent.drafting
    hand.kv.pool.release(1, taken)
    hand.kv.check_integrity()


def test_a_fork_without_room_for_its_target_page_holds_nothing() -> None:
    hand = Hand(make_manager(full(page=8), pages=4))
    parent = hand.prefill(ids(20), total=24)
    taken = hand.kv.pool.acquire(0, 1)
    child = hand.open([*ids(20), OTHER], total=24)
    with pytest.raises(OutOfPages):
        hand.kv.fork(parent, child)
    assert not child.admitted
    assert child.groups[0].held() == []
    hand.kv.pool.release(0, taken)
    hand.kv.check_integrity()


# ---- a step in flight ----------------------------------------------------------------------------------


def test_pages_that_a_step_in_flight_may_touch_are_not_reused() -> None:
    hand = Hand(make_manager(full(page=8), pages=8))
    kv = hand.kv
    sequence = hand.admit(ids(20), total=32)
    kv.reserve(sequence, 20, 0)
    plan = hand.plan()
    pages = set(sequence.groups[0].held())
    kv.close(sequence)
    assert available(kv) == [5]
    assert {page for _arena, page in kv.pool.pending()} == pages
    kv.check_integrity()
    assert not set(kv.pool.acquire(0, 5)) & pages
    with pytest.raises(OutOfPages):
        kv.pool.acquire(0, 1)
    hand.done(plan)
    assert available(kv) == [3]
    assert list(kv.pool.pending()) == []


def test_each_step_gives_back_only_what_was_let_go_before_the_next_one_was_planned() -> None:
    hand = Hand(make_manager(full(page=8), pages=8))
    kv = hand.kv
    first, second = hand.admit(ids(8), total=16), hand.admit(ids(8, seed=1), total=16)
    for sequence in (first, second):
        kv.reserve(sequence, 8, 0)
    one = hand.plan()
    kv.close(first)
    two = hand.plan()
    kv.close(second)
    assert available(kv) == [6]
    hand.done(one)
    assert available(kv) == [7]
    hand.done(two)
    assert available(kv) == [8]


def test_a_copy_that_no_plan_took_does_not_land_in_a_page_of_another_sequence() -> None:
    hand = Hand(make_manager(full(page=8), pages=6))
    kv = hand.kv
    hand.serve(ids(16), total=16)
    sequence = hand.admit(ids(12), total=16)
    kv.release(sequence)
    assert hand.plan().copies == ()
    kv.check_integrity()


# ---- admission control ---------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_and_what_can_is_not() -> None:
    kv = make_manager(full(page=8), pages=10)
    with pytest.raises(AdmissionError, match="10; shorten the prompt, lower max_tokens"):
        kv.open("big", ids(8), total_tokens=8 * 10)
    assert kv.sequences == {}
    sequence = kv.open("fits", ids(8), total_tokens=8 * 9)
    kv.admit(sequence)
    kv.reserve(sequence, 72, 0)


def test_a_window_needs_room_for_the_window_and_a_step_not_for_the_length() -> None:
    kv = make_manager(sliding(16, page=8), pages=10, step_tokens=32)
    kv.open("long", ids(8), total_tokens=100_000)
    with pytest.raises(AdmissionError):
        make_manager(sliding(80, page=8), pages=10, step_tokens=32).open("long", ids(8), total_tokens=100_000)


def test_draft_groups_that_never_fit_do_not_refuse_the_request() -> None:
    kv = make_manager(full(page=8), footprint=drafter("block_from_taps", slot_bytes=2), pages=(20, 3))
    kv.open("target fits", ids(8), total_tokens=100, k=3)
    assert not kv.draft_fits(100, 3)
    assert kv.draft_fits(10, 3)


@pytest.mark.parametrize("archetype", ["nothing", *ARCHETYPES_WITH_KV])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 17])
def test_what_was_admitted_runs_to_its_end_in_exactly_the_worst_case(archetype: str, window: int | None) -> None:
    """Alone in arenas of the size that admission asks for, with every chunk and every draft length."""
    group = full(page=4) if window is None else sliding(window, page=4)
    for total, k, step in ((40, 0, 8), (61, 3, 16), (33, 5, 3)):
        config = {"step_tokens": step, "footprint": drafter(archetype, page=4)}
        probe = make_manager(group, pages=500, **config)
        worst = worst_case_pages(probe.layout, probe.config, total, k, draft=True)
        kv = make_manager(group, pages=tuple(worst), **config)
        hand = Hand(kv)
        sequence = hand.open(ids(total // 2), total=total, k=k)
        kv.admit(sequence)
        prompt, v = len(sequence.tokens), 0
        while v < total - 1:
            m = min(step, prompt - v) if v < prompt else min(1 + k, total - 1 - v)
            proposes = kv.layout.footprint.fit(
                k=k if v + m >= prompt else 0, v=v + m, max_model_len=10**6, remaining_tokens=total - v - m - 1
            )
            kv.reserve(sequence, v + m, kv.layout.footprint.reserve_end(v=v + m, k=proposes))
            assert sequence.drafting == bool(kv.layout.draft_groups)
            plan = hand.plan()
            v += m
            sequence.tokens.extend([5] * (v + 1 - len(sequence.tokens)))
            kv.commit(sequence, v)
            hand.done(plan)
        kv.check_integrity()
