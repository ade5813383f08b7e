"""Hits: as long as the cache allows, the same with and without a drafter, and never a wrong slot."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from random import Random

import pytest
from tests.kv.fakes import (
    Hand,
    Watch,
    assert_at_rest,
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

from outrider.kv import GroupSpec, Interval, KVFootprint, KVManager, Proposing
from outrider.kv.ledger import SequenceKV
from outrider.kv.plan import PageCopy

# ---- the target's hit -------------------------------------------------------------------------------


def test_a_fully_cached_prompt_recomputes_one_token_in_a_copied_page() -> None:
    hand = Hand(make_manager(full(page=16)))
    kv = hand.kv
    hand.serve(ids(32))
    sequence = hand.admit(ids(32))
    assert sequence.hit == sequence.committed == 31
    shared, copied = held_pages(kv, sequence, 0).values()
    index = set(kv.pool.indexes[0].pages.values())
    assert shared in index
    assert copied not in index
    plan = hand.plan()
    (source,) = index - {shared}
    assert plan.copies == (PageCopy(0, source, copied, 0, 15),)
    assert hand.tables.table(sequence.id, 0) == [shared, copied]


def test_the_source_of_a_copy_stays_held_until_the_copy_has_run() -> None:
    hand = Hand(make_manager(full(page=16), pages=6))
    kv = hand.kv
    hand.serve(ids(32), total=32)
    sequence = hand.admit(ids(32), total=33)
    (_, source) = kv.pool.indexes[0].pages.values()
    arena = kv.pool.arenas[0]
    assert arena.refs[source] == 1
    plan = hand.plan()
    assert arena.refs[source] == 1
    # A request that needs pages now must not get it.
    assert source not in kv.pool.acquire(0, arena.num_available)
    hand.done(plan)
    assert arena.refs[source] == 0
    assert sequence.committed == 31


def test_a_request_for_prompt_logprobs_takes_no_hit_but_leaves_its_pages() -> None:
    hand = Hand(make_manager(full(page=16), footprint=drafter("chain_from_taps", page=16)))
    hand.serve(ids(48))
    assert hand.admit(ids(48), use_cache=False).hit == 0
    assert hand.admit(ids(48)).hit == 47


def test_without_prefix_caching_nothing_is_published_or_hit() -> None:
    hand, watch = watched(full(page=16), prefix_caching=False)
    hand.serve(ids(40))
    assert watch.log == []
    assert hand.admit(ids(40)).hit == 0
    assert available(hand.kv) == everything(hand.kv)


def test_two_requests_that_compute_the_same_page_publish_it_once() -> None:
    hand, watch = watched(full(page=8))
    first, second = hand.admit(ids(16)), hand.admit(ids(16))
    for sequence in (first, second):
        sequence.tokens.append(5)
        hand.advance(sequence, 16)
    assert watch.numbers(first, 0) == [0, 1]
    assert watch.numbers(second, 0) == []
    hand.kv.close(first)
    hand.kv.close(second)
    hand.settle()
    assert_at_rest(hand.kv)
    assert len(hand.kv.pool.indexes[0]) == 2


def test_reset_cache_forgets_everything_and_frees_what_is_not_held() -> None:
    hand = Hand(make_manager(full(page=8), pages=16))
    hand.serve(ids(24))
    running = hand.prefill(ids(24, seed=1))
    hand.kv.reset_cache()
    hand.kv.check_integrity()
    assert hand.admit(ids(24)).hit == 0
    assert hand.admit(ids(24, seed=1)).hit == 0
    hand.decode(running, range(8))
    hand.kv.check_integrity()


class BruteForce(Watch):
    """What is published, slot by slot, as tokens: the reference for every hit."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.kv: KVManager

    def published(self, sequence: SequenceKV, group: int, page_number: int, page: int, key: bytes) -> None:
        layout = self.kv.layout
        end = (page_number + 1) * layout.groups[group].page_tokens + layout.reach[group]
        assert len(sequence.tokens) >= end
        self.pages[group, page] = (page_number, tuple(sequence.tokens[:end]))

    def evicted(self, arena: int, page: int) -> None:
        for group in range(len(self.kv.layout.groups)):
            if self.kv.layout.arena_of[group] == arena:
                self.pages.pop((group, page), None)

    def slots(self, group: int, tokens: Iterable[int]) -> set[int]:
        """Positions of this sequence that some page of the group holds."""
        known = tuple(tokens)
        size, reach = self.kv.layout.groups[group].page_tokens, self.kv.layout.reach[group]
        found = set()
        for (g, _page), (number, content) in self.pages.items():
            if g == group and content[: number * size] == known[: number * size]:
                for p in range(number * size, (number + 1) * size):
                    end = p + 1 + reach
                    if end <= len(known) and content[:end] == known[:end]:
                        found.add(p)
                    else:
                        break
        return found


@pytest.mark.parametrize("archetype", ["nothing", "chain_from_tokens", "chain_from_taps", "block_from_taps"])
@pytest.mark.parametrize(
    "groups",
    [
        (full(page=4),),
        (sliding(6, page=4),),
        (full(page=8), sliding(5, page=2)),
        (full(page=4), sliding(9, "a", page=4), sliding(3, "b", page=8, slot_bytes=2)),
    ],
    ids=["full", "sliding", "small sliding pages", "mixed"],
)
def test_every_hit_equals_a_search_through_all_that_is_published(archetype: str, groups: tuple[GroupSpec, ...]) -> None:
    watch = BruteForce()
    kv = make_manager(*groups, footprint=drafter(archetype, page=4), pages=20, observer=watch)
    watch.kv = kv
    hand, rng, footprint = Hand(kv), Random(1), kv.layout.footprint
    hits = tapped = 0
    for _ in range(150):
        # Two letters: prompts share long prefixes and part ways anywhere.
        prompt = array("I", [1] * rng.randint(0, 12) + rng.choices((1, 2), k=rng.randint(1, 14)))
        held = [watch.slots(g, prompt) for g in range(len(kv.layout.groups))]
        sequence = hand.open(prompt, total=len(prompt) + 8)
        kv.admit(sequence)
        hit = watch.hits[sequence.id]
        assert hit.end == max(
            end
            for end in range(len(prompt))
            if all(set(range(*kv.layout.groups[g].kind.needed(end))) <= held[g] for g in kv.layout.target_groups)
        )
        hits += hit.end > 0
        tapped += hit.tap_rows > 0
        for g, run in zip(kv.layout.draft_groups, hit.draft, strict=True):
            assert set(range(*run)) <= held[g]
            assert hit.end - footprint.token_reach <= run.end <= hit.end or footprint.rebuild
            if set(range(hit.end)) <= held[g]:
                assert run == Interval(0, hit.end)
        end = len(prompt)
        sequence.tokens.append(rng.choice((1, 2)))
        hand.advance(sequence, end)
        kv.close(sequence)
        hand.settle()
        kv.check_integrity()
    assert hits > 50
    assert watch.pages
    assert tapped or footprint.token_reach == 0 or len(groups) > 1


# ---- draft groups beside a hit -------------------------------------------------------------------------


def test_draft_groups_of_one_drafter_end_together() -> None:
    """One group has its run up to the tap row, the other has lost everything."""
    groups = (full("d0"), full("d1", slot_bytes=2))
    hand, watch = watched(full(page=8), footprint=drafter("chain_from_taps", *groups))
    hand.serve(ids(32))
    for page in list(hand.kv.pool.indexes[2].pages.values()):
        hand.kv.pool.indexes[2].remove([page])
    sequence = hand.admit(ids(24) + ids(9, seed=1))
    assert watch.hits[sequence.id] == (24, 1, (Interval(0, 23), Interval(23, 23)))
    assert [state.low for state in sequence.groups] == [0, 0, 23]


def test_hits_are_counted_against_what_was_asked_for() -> None:
    hand = Hand(make_manager(full(page=8)))
    hand.serve(ids(32))
    hand.admit(ids(20) + ids(10, seed=1))
    assert (hand.kv.hit_tokens, hand.kv.queried_tokens) == (20, 31 + 29)


def test_draft_pages_that_are_gone_leave_a_later_low_and_the_hit_as_it_was() -> None:
    hand, watch = watched(full(page=8), footprint=drafter("block_from_taps", slot_bytes=2), pages=(32, 8))
    kv = hand.kv
    hand.serve(ids(40), total=40)
    taken = kv.pool.acquire(1, 8)
    kv.pool.release(1, taken)
    assert len(kv.pool.indexes[1]) == 0
    sequence = hand.admit(ids(40), total=48)
    assert watch.hits[sequence.id] == (39, 0, (Interval(39, 39),))
    assert sequence.groups[1].low == 39
    assert sequence.drafting
    sequence.tokens.append(5)
    hand.advance(sequence, 40)
    # Slots 32..38 of that page were never written, so it must not be in the index.
    assert watch.numbers(sequence, 1) == []
    hand.decode(sequence, range(8))
    assert watch.numbers(sequence, 1) == [5]


READING = KVFootprint(name="reading", proposing=Proposing.CHAIN, groups=(full("draft"),), taps=(1,), feed_reads_kv=True)
"""Feeding a slot reads the drafter's own earlier slots, as in a module of several layers."""


def test_a_drafter_that_reads_its_own_kv_publishes_nothing_above_a_gap() -> None:
    hand, watch = watched(full(page=8), footprint=READING)
    hand.serve(ids(24), may_draft=False)
    above = hand.prefill(ids(25) + ids(7, seed=1))
    assert above.groups[1].low == 24
    hand.decode(above, range(30))
    assert watch.numbers(above, 1) == []
    assert len(hand.kv.pool.indexes[1]) == 0


def test_a_drafter_that_reads_its_own_kv_takes_a_whole_run_and_none_above_a_gap() -> None:
    hand, watch = watched(full(page=8), footprint=READING)
    hand.serve(ids(40))
    whole = hand.admit(ids(40))
    assert watch.hits[whole.id] == (39, 0, (Interval(0, 39),))
    hand.kv.close(whole)
    hand.settle()
    index = hand.kv.pool.indexes[1]
    index.remove([next(iter(index.pages.values()))])
    above = hand.admit(ids(40))
    assert watch.hits[above.id] == (39, 0, (Interval(39, 39),))


@pytest.mark.parametrize(
    ("archetype", "run"),
    [("block_from_taps", (24, 39)), ("chain_from_taps", (24, 39)), ("chain_from_tokens", (0, 16))],
)
def test_beside_a_gap_a_drafter_takes_the_last_run_or_the_first_that_it_can_rebuild_from(
    archetype: str, run: tuple[int, int]
) -> None:
    hand, watch = watched(full(page=8), footprint=drafter(archetype))
    hand.serve(ids(40))
    index = hand.kv.pool.indexes[1]
    index.remove([list(index.pages.values())[2]])
    sequence = hand.admit(ids(40))
    assert watch.hits[sequence.id] == (39, 0, (Interval(*run),))
    assert (sequence.groups[1].low, sequence.draft_end) == run
