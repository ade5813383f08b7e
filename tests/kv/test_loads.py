"""Loads and exports: intervals of durable slots, in any order, with failures, and nothing half done."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from random import Random

import pytest
from tests.kv.fakes import (
    ARCHETYPES_WITH_KV,
    Hand,
    Watch,
    assert_tables_agree,
    available,
    drafter,
    everything,
    full,
    held_pages,
    ids,
    make_manager,
    sliding,
    watched,
)

from outrider.kv import GroupSpec, Interval
from outrider.kv.groups import Full, Sliding
from outrider.kv.intervals import page_count
from outrider.kv.ledger import Load, SequenceKV
from outrider.kv.loading import wanted
from outrider.kv.pages import NULL_PAGE

# ---- loads from another worker -------------------------------------------------------------------------

ALL_GROUPS = (0, 1, 2)


def decode_side(archetype: str = "chain_from_taps") -> tuple[Hand, Watch]:
    return watched(full(page=8), sliding(6, page=8), footprint=drafter(archetype))


def loading(hand: Hand, length: int, groups: Iterable[int] = ALL_GROUPS) -> tuple[SequenceKV, tuple[Load, ...]]:
    """A request whose first `length` positions a peer holds, and which has one sampled token."""
    sequence = hand.open(ids(length + 1), total=length + 20)
    admission = hand.kv.admit(sequence, remote={g: Interval(0, length) for g in groups})
    hand.settle()
    return sequence, admission.loads


def by_group(loads: Iterable[Load]) -> dict[int, Interval]:
    return {load.group: load.interval for load in loads}


def test_a_load_asks_for_exactly_what_is_needed_and_not_held() -> None:
    hand, _watch = decode_side()
    sequence, loads = loading(hand, 40)
    # Full groups from 0; the window of 6 before 40, and a margin for the rows that run again.
    assert by_group(loads) == {0: Interval(0, 40), 1: Interval(40 - 6 + 1 - 2, 40), 2: Interval(0, 40)}
    assert sequence.loading
    hand.serve(ids(20) + ids(20, seed=1))
    second, loads = loading(hand, 40)
    assert second.hit == 20
    assert by_group(loads) == {0: Interval(20, 40), 1: Interval(33, 40), 2: Interval(19, 40)}


@pytest.mark.parametrize("kind", [Full(), Sliding(1), Sliding(6), Sliding(9)], ids=lambda kind: kind.label)
def test_wanted_and_held_together_are_the_need_or_the_offer_is_left_alone(kind: Full | Sliding) -> None:
    """Position by position, for any offer and any hit that ended below the load's end."""
    rng = Random(5)
    for _ in range(1500):
        hit, end = sorted((rng.randint(0, 30), rng.randint(0, 30)))
        held = Interval(kind.needed(hit).start // 4 * 4, hit) if rng.random() < 0.7 else Interval(0, 0)
        offered = Interval(*sorted((rng.randint(0, 32), rng.randint(0, 32))))
        margin = rng.randint(0, 3)
        want = wanted(kind, end=end, margin=margin, held=held, offered=offered)
        have, offer = set(range(*held)), set(range(*offered))
        need = set(range(*kind.needed(end)))
        enough = need <= have or need <= {p for p in offer if p >= hit or not have} | have
        assert (want is not None) == enough, (held, end, offered)
        if want is None:
            continue
        asked = set(range(*want))
        assert need <= have | asked
        assert asked <= offer
        assert not asked & have
        assert asked <= set(range(*kind.needed(end, margin)))


@pytest.mark.parametrize("short", [ALL_GROUPS, (0,), (1,)], ids=["everywhere", "full group", "window"])
def test_an_offer_that_is_too_short_for_the_target_is_left_alone(short: tuple[int, ...]) -> None:
    hand, _watch = decode_side()
    sequence = hand.open(ids(41), total=60)
    admission = hand.kv.admit(sequence, remote={g: Interval(0, 39 if g in short else 40) for g in ALL_GROUPS})
    assert admission.loads == ()
    assert (sequence.committed, sequence.loading) == (0, False)
    assert available(hand.kv) == everything(hand.kv)


@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
def test_a_drafter_whose_own_pages_are_gone_is_sent_all_of_its_context(archetype: str) -> None:
    """The target's prefix is here, the drafter's is not, and the peer has it."""
    hand, watch = decode_side(archetype)
    hand.serve(ids(20) + ids(20, seed=1), may_draft=False)
    sequence, loads = loading(hand, 40)
    assert watch.hits[sequence.id].end == 20
    assert by_group(loads)[2] == Interval(0, 40)
    for load in loads:
        hand.kv.import_interval(sequence, load)
    assert hand.kv.finish_loading(sequence) == 40
    assert (sequence.groups[2].low, sequence.draft_end) == (0, 40)
    hand.kv.check_integrity()


@pytest.mark.parametrize(("arrived", "end"), [(True, 40), (False, 0)])
def test_only_the_first_notice_of_a_load_counts(arrived: bool, end: int) -> None:
    hand, _watch = decode_side()
    sequence, loads = loading(hand, 40)
    notices = (hand.kv.import_interval, hand.kv.fail_load)
    for load in reversed(loads):
        assert sequence.loading
        for notice in notices if arrived else notices[::-1]:
            notice(sequence, load)
    assert not sequence.loading
    assert hand.kv.finish_loading(sequence) == sequence.committed == end
    assert sequence.loads == {}
    hand.kv.check_integrity()


def test_nothing_is_published_before_every_target_group_has_arrived() -> None:
    hand, watch = decode_side()
    kv = hand.kv
    sequence, loads = loading(hand, 40)
    for load in loads:
        assert watch.log == []
        assert hand.kv.search(hand.open(ids(41)), 40, draft=True)[0].end == 0
        kv.import_interval(sequence, load)
    assert watch.log == []
    kv.finish_loading(sequence)
    assert watch.numbers(sequence, 0) == [0, 1, 2, 3, 4]
    # The page of slot 33 was not sent whole.
    assert watch.numbers(sequence, 1) == []
    assert watch.numbers(sequence, 2) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize(
    ("length", "resumed"), [(21, 20), (40, 0)], ids=["window overlaps the hit", "window has left the hit"]
)
def test_a_failed_target_load_resumes_at_the_longest_end_that_is_held(failed: int, length: int, resumed: int) -> None:
    """Local hit of 20. A window that has moved past it gave its pages up, and is looked up again."""
    hand, _watch = decode_side("block_from_taps")
    kv = hand.kv
    hand.serve(ids(20) + ids(20, seed=1))
    sequence, loads = loading(hand, length)
    assert sequence.hit == 20
    for load in loads:
        if load.group == failed:
            kv.fail_load(sequence, load)
        else:
            kv.import_interval(sequence, load)
    assert kv.finish_loading(sequence) == sequence.committed == resumed
    kv.check_integrity()
    for g in (0, 1):
        needed = kv.layout.groups[g].kind.needed(resumed)
        assert needed.empty or sequence.groups[g].low <= needed.start
        assert len(sequence.groups[g].held()) <= page_count(resumed, 8)
    assert_tables_agree(hand, sequence)
    # What was given up is still in the index.
    kv.release(sequence)
    assert kv.admit(sequence).hit == 20


@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
def test_a_failed_draft_load_recomputes_nothing(archetype: str) -> None:
    hand, watch = decode_side(archetype)
    kv = hand.kv
    sequence, loads = loading(hand, 40)
    for load in loads:
        if load.group == 2:
            kv.fail_load(sequence, load)
        else:
            kv.import_interval(sequence, load)
    assert kv.finish_loading(sequence) == 40
    assert sequence.drafting
    if kv.layout.footprint.rebuild:
        assert (sequence.draft_end, sequence.groups[2].low) == (0, 0)
    else:
        assert (sequence.draft_end, sequence.groups[2].low) == (40, 40)
    assert sequence.groups[2].held() == []
    assert watch.numbers(sequence, 2) == []
    assert_tables_agree(hand, sequence)
    kv.check_integrity()


@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
def test_a_peer_without_the_draft_groups_is_asked_for_the_target_only(archetype: str) -> None:
    hand, _watch = decode_side(archetype)
    kv = hand.kv
    sequence, loads = loading(hand, 40, (0, 1))
    assert {load.group for load in loads} == {0, 1}
    for load in loads:
        kv.import_interval(sequence, load)
    assert kv.finish_loading(sequence) == 40
    assert sequence.draft_end == (0 if kv.layout.footprint.rebuild else 40)
    kv.check_integrity()


@pytest.mark.parametrize("archetype", ["chain_from_tokens", "chain_from_taps", "block_from_taps"])
def test_a_drafter_with_a_limit_is_sent_what_it_can_store(archetype: str) -> None:
    hand, _watch = watched(full(page=8), footprint=drafter(archetype, max_len=24))
    sequence, loads = loading(hand, 40, (0, 1))
    footprint = hand.kv.layout.footprint
    limit = 24 - footprint.durable_lead
    assert by_group(loads) == {0: Interval(0, 40), 1: Interval(0, limit)}
    for load in loads:
        hand.kv.import_interval(sequence, load)
    assert hand.kv.finish_loading(sequence) == 40
    assert (sequence.groups[1].low, sequence.draft_end) == (0, limit)


def test_loading_is_not_finished_before_the_copies_beside_it_have_run() -> None:
    """A page is filled by both: its front from the cache, its rest from the peer."""
    hand = Hand(make_manager(full(page=8)))
    kv = hand.kv
    hand.serve(ids(20) + ids(20, seed=1))
    sequence = hand.open(ids(41), total=60)
    (load,) = kv.admit(sequence, remote={0: Interval(0, 40)}).loads
    assert load.interval == Interval(20, 40)
    kv.import_interval(sequence, load)
    assert not kv.may_finish_loading(sequence)
    plan = hand.plan()
    assert len(plan.copies) == 1
    assert not kv.may_finish_loading(sequence)
    hand.done(plan)
    assert kv.may_finish_loading(sequence)
    assert kv.finish_loading(sequence) == 40


def test_a_lost_transfer_sets_its_pages_aside_until_its_handle_is_gone() -> None:
    hand, _watch = decode_side()
    kv = hand.kv
    sequence, loads = loading(hand, 40)
    pages = {
        (load.group, page)
        for load in loads[1:]
        for number, page in held_pages(kv, sequence, load.group).items()
        if load.interval.start // 8 <= number
    }
    kv.import_interval(sequence, loads[0])
    aside = kv.abandon_loading(sequence)
    assert {(g, page) for g, group_pages in aside for page in group_pages} == pages
    assert not sequence.admitted
    kv.check_integrity()
    assert available(kv) == [everything(kv)[0] - len(pages)]
    for arena in kv.pool.arenas:
        assert not {page for _g, page in pages} & set(arena.acquire(arena.num_available))
    kv.restore_quarantined(aside)
    assert available(kv) == [len(pages)]


def test_a_copy_into_an_abandoned_page_is_not_planned() -> None:
    """The page may be restored and given to another sequence before the next plan."""
    hand = Hand(make_manager(full(page=8)))
    kv = hand.kv
    hand.serve(ids(16))
    sequence = hand.open(ids(12) + ids(9, seed=1), total=40)
    kv.admit(sequence, remote={0: Interval(0, 20)})
    aside = kv.abandon_loading(sequence)
    kv.restore_quarantined(aside)
    assert hand.plan().copies == ()


class Shelf:
    """Another tier: knows pages by key."""

    def __init__(self) -> None:
        self.keys: set[tuple[int, bytes]] = set()

    def contains(self, group: int, key: bytes) -> bool:
        return (group, key) in self.keys


def on_the_shelf(*target: GroupSpec, tokens: array[int], groups: Iterable[int]) -> tuple[Hand, Shelf]:
    """A manager whose device is empty and whose other tier holds these groups of a sequence."""
    shelf = Shelf()
    source = Hand(make_manager(*target))
    source.serve(tokens)
    for g in groups:
        shelf.keys |= {(g, key) for key in source.kv.pool.indexes[g].pages}
    return Hand(make_manager(*target, tiers=[shelf])), shelf


def test_a_hit_in_another_tier_is_loaded_page_by_page_and_then_published() -> None:
    hand, _shelf = on_the_shelf(full(page=8), tokens=ids(40), groups=[0])
    sequence = hand.open(ids(32), total=48)
    admission = hand.kv.admit(sequence)
    assert admission.hit == 31
    ends = [8, 16, 24, 31]
    assert [load.interval for load in admission.loads] == [Interval(8 * n, end) for n, end in enumerate(ends)]
    assert all(load.key is not None for load in admission.loads)
    for load in reversed(admission.loads):
        assert len(hand.kv.pool.indexes[0]) == 0
        hand.kv.import_interval(sequence, load)
    assert hand.kv.finish_loading(sequence) == 31
    assert len(hand.kv.pool.indexes[0]) == 3
    hand.kv.check_integrity()


def test_a_hit_is_the_union_of_the_device_and_other_tiers() -> None:
    hand, shelf = on_the_shelf(full(page=8), tokens=ids(40), groups=[0])
    hand.serve(ids(17))
    keys = {key for _group, key in shelf.keys}
    shelf.keys -= {(0, key) for key in keys & hand.kv.pool.indexes[0].pages.keys()}
    assert len(shelf.keys) == 3
    sequence = hand.open(ids(41), total=48)
    admission = hand.kv.admit(sequence)
    assert admission.hit == 40
    assert [load.interval for load in admission.loads] == [Interval(8 * n, 8 * n + 8) for n in (2, 3, 4)]


@pytest.mark.parametrize("failed", range(4))
def test_a_failed_page_of_another_tier_ends_the_hit_before_it(failed: int) -> None:
    hand, _shelf = on_the_shelf(full(page=8), tokens=ids(40), groups=[0])
    sequence = hand.open(ids(32), total=48)
    for number, load in enumerate(hand.kv.admit(sequence).loads):
        (hand.kv.fail_load if number == failed else hand.kv.import_interval)(sequence, load)
    assert hand.kv.finish_loading(sequence) == 8 * failed
    assert len(sequence.groups[0].pages) == failed
    hand.kv.check_integrity()


def test_abandoning_a_page_that_a_tier_and_a_peer_both_write_sets_it_aside_once() -> None:
    """The hit ends inside the large page, whose rest comes from the peer."""
    hand, _shelf = on_the_shelf(full("a", page=16), full("b", page=8), tokens=ids(48), groups=[0])
    kv = hand.kv
    hand.serve(ids(8) + ids(8, seed=1))
    sequence = hand.open(ids(41), total=64)
    admission = kv.admit(sequence, remote={0: Interval(0, 40), 1: Interval(0, 40)})
    assert admission.hit == 8
    aside = kv.abandon_loading(sequence)
    pages = [(g, page) for g, group_pages in aside for page in group_pages]
    assert len(set(pages)) == len(pages)
    assert all(page != NULL_PAGE for _g, page in pages)
    kv.check_integrity()
    kv.restore_quarantined(aside)
    kv.check_integrity()


# ---- exports -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("archetype", ARCHETYPES_WITH_KV)
def test_an_export_holds_durable_slots_only_and_never_scratch(archetype: str) -> None:
    hand, _watch = decode_side(archetype)
    kv = hand.kv
    footprint = kv.layout.footprint
    sequence = hand.admit(ids(21), k=5, total=80)
    sequence.tokens.append(5)
    rng = Random(3)
    hand.advance(sequence, 21, k=5)
    for _ in range(20):
        v = sequence.committed
        out = kv.export_intervals(sequence)
        assert out[0] == Interval(0, v)
        assert out[1].end == v
        assert out[1].start % 8 == 0
        assert out[1].covers(kv.layout.groups[1].kind.needed(v))
        assert out[2] == Interval(0, v)
        assert out[2].end <= footprint.scratch(v, 5).start
        held = held_pages(kv, sequence, 1)
        assert out[1].start >= 8 * min(held)
        ahead = rng.randint(1, 6)
        kv.reserve(sequence, v + 6, footprint.reserve_end(v=v + 6, k=5))
        assert kv.export_intervals(sequence) == out
        sequence.tokens.extend([4] * ahead)
        plan = hand.plan()
        kv.commit(sequence, min(v + ahead, 60))
        hand.done(plan)


def test_an_export_starts_at_the_first_valid_slot() -> None:
    hand, _watch = watched(full(page=8), footprint=drafter("block_from_taps"))
    hand.serve(ids(40), may_draft=False)
    sequence = hand.prefill(ids(21))
    assert hand.kv.export_intervals(sequence) == {0: Interval(0, 21), 1: Interval(20, 21)}


def test_a_worker_keeps_the_margin_that_its_peer_will_ask_for() -> None:
    """Pages have one slot each, so that everything behind the window and the margin is freed."""
    hand, _watch = watched(full(page=1), sliding(6, page=1), keep_margin=2, pages=300)
    sequence = hand.prefill(ids(40))
    assert hand.kv.export_intervals(sequence)[1] == Interval(40 - 6 + 1 - 2, 40)
    hand.decode(sequence, ids(9, seed=2))
    assert hand.kv.export_intervals(sequence)[1] == Interval(49 - 6 + 1 - 2, 49)
