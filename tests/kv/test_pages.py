"""The arena: who gets a page, who loses one, and that none is ever in two places."""

from __future__ import annotations

from random import Random

import pytest
from tests.kv.fakes import Hand, Watch, full, held_pages, ids, make_manager

from outrider.errors import OutOfPages
from outrider.kv.pages import SINK, PageArena


def make_arena(num_pages: int = 9) -> tuple[PageArena, list[int]]:
    """An arena, and the pages that it evicts from now on."""
    evicted: list[int] = []

    def on_evict(index: int, pages: list[int]) -> None:
        evicted.extend(pages)
        for page in pages:
            arena.published[page] = 0

    arena = PageArena(3, num_pages, on_evict)
    return arena, evicted


def publish(arena: PageArena, pages: list[int]) -> None:
    for page in pages:
        arena.published[page] = 1


def test_pages_are_handed_out_once_and_the_sink_never() -> None:
    arena, _ = make_arena(9)
    first, second = arena.acquire(5), arena.acquire(3)
    assert sorted(first + second) == list(range(1, 9))
    assert SINK not in first + second
    assert (arena.num_available, arena.num_held) == (0, 8)
    assert arena.acquire(0) == []
    arena.check_integrity()


def test_acquire_takes_all_or_nothing() -> None:
    arena, evicted = make_arena(9)
    held = arena.acquire(6)
    publish(arena, held[:3])
    arena.release(held[:3])
    before = (arena.num_free, arena.num_cached, list(arena.refs), bytes(arena.published))
    with pytest.raises(OutOfPages) as shortage:
        arena.acquire(7)
    assert (shortage.value.arena, shortage.value.missing_pages) == (3, 2)
    assert (arena.num_free, arena.num_cached, list(arena.refs), bytes(arena.published)) == before
    assert evicted == []
    assert len(arena.acquire(5)) == 5
    arena.check_integrity()


def test_the_least_recently_used_page_goes_first_and_free_pages_go_before_cached_ones() -> None:
    arena, evicted = make_arena(9)
    a, b, c, d = arena.acquire(4)
    publish(arena, [a, b, c, d])
    arena.release([b, a])
    arena.release([d, c])
    assert (arena.num_free, arena.num_cached) == (4, 4)
    arena.acquire(4)
    assert evicted == []
    assert arena.acquire(1) == [b]
    assert evicted == [b]
    arena.acquire(2)
    assert evicted == [b, a, d]


def test_a_page_used_again_is_evicted_last() -> None:
    arena, evicted = make_arena(4)
    a, b, c = arena.acquire(3)
    publish(arena, [a, b, c])
    arena.release([a, b, c])
    arena.retain([a])
    assert arena.num_cached == 2
    arena.release([a])
    arena.acquire(3)
    assert evicted == [b, c, a]


def test_a_page_that_is_held_is_never_evicted() -> None:
    arena, evicted = make_arena(4)
    pages = arena.acquire(3)
    publish(arena, pages)
    arena.release(pages)
    arena.retain(pages[:2])
    assert arena.acquire(1) == pages[2:]
    with pytest.raises(OutOfPages):
        arena.acquire(1)
    assert evicted == pages[2:]
    arena.check_integrity()


def test_a_shared_page_stays_until_its_last_holder_lets_go() -> None:
    arena, _ = make_arena(4)
    (page,) = arena.acquire(1)
    arena.retain([page])
    arena.retain([page])
    arena.release([page])
    arena.release([page])
    assert arena.num_available == 2
    arena.release([page])
    assert arena.num_free == 3
    with pytest.raises(AssertionError, match="released too often"):
        arena.release([page])


def test_an_unpublished_page_is_free_at_once_and_a_published_one_is_cached() -> None:
    arena, _ = make_arena(4)
    kept, gone = arena.acquire(2)
    publish(arena, [kept])
    arena.release([kept, gone])
    assert (arena.num_free, arena.num_cached) == (2, 1)
    arena.forget_cached()
    assert (arena.num_free, arena.num_cached) == (3, 0)
    assert not any(arena.published)
    arena.check_integrity()


def test_quarantined_pages_are_neither_handed_out_nor_lost() -> None:
    arena, _ = make_arena(6)
    aside = arena.acquire(2)
    arena.quarantine(aside)
    arena.check_integrity()
    assert (arena.num_available, arena.num_held) == (3, 0)
    others = arena.acquire(3)
    assert not set(others) & set(aside)
    with pytest.raises(OutOfPages):
        arena.acquire(1)
    arena.restore(aside)
    arena.release(aside)
    arena.check_integrity()
    assert sorted(arena.acquire(2)) == sorted(aside)


def test_a_shared_or_published_page_cannot_be_quarantined() -> None:
    arena, _ = make_arena(6)
    shared, published = arena.acquire(2)
    arena.retain([shared])
    publish(arena, [published])
    for page in (shared, published):
        with pytest.raises(AssertionError, match="shared or published"):
            arena.quarantine([page])


@pytest.mark.parametrize(
    "break_it",
    [
        lambda arena, held: arena.refs.__setitem__(held, 0),
        lambda arena, held: arena.refs.__setitem__(5, 1),
        lambda arena, held: arena.quarantined.add(held),
        lambda arena, held: arena.quarantined.add(5),
        lambda arena, held: arena.published.__setitem__(5, 1),
        lambda arena, held: arena.published.__setitem__(SINK, 1),
        lambda arena, held: arena.refs.__setitem__(SINK, 0),
    ],
    ids=[
        "held page lost",
        "free page held",
        "held page quarantined",
        "free page quarantined",
        "free page published",
        "sink published",
        "sink released",
    ],
)
def test_integrity_check_fires(break_it) -> None:
    arena, _ = make_arena(9)
    (held,) = arena.acquire(1)
    assert held != 5
    arena.check_integrity()
    break_it(arena, held)
    with pytest.raises(AssertionError):
        arena.check_integrity()


@pytest.mark.parametrize("seed", range(8))
def test_pages_are_conserved_and_evicted_in_order_whatever_happens(seed: int) -> None:
    """Against a plain model: a set of free pages, an LRU list, a count of holders."""
    rng = Random(seed)
    arena, evicted = make_arena(12)
    holders: dict[int, int] = {}
    lru: list[int] = []
    quarantined: list[int] = []
    for _ in range(600):
        action = rng.choice(("acquire", "acquire", "retain", "release", "release", "publish", "quarantine", "restore"))
        if action == "acquire":
            count = rng.randint(0, 5)
            free = 11 - len(holders) - len(lru) - len(quarantined)
            if count > free + len(lru):
                with pytest.raises(OutOfPages):
                    arena.acquire(count)
                continue
            out, lru = lru[: max(0, count - free)], lru[max(0, count - free) :]
            evicted.clear()
            pages = arena.acquire(count)
            assert evicted == out
            assert not set(pages) & (holders.keys() | set(lru) | set(quarantined) | {SINK})
            holders.update(dict.fromkeys(pages, 1))
        elif action == "retain" and (holders or lru):
            page = rng.choice([*holders, *lru])
            arena.retain([page])
            holders[page] = holders.get(page, 0) + 1
            if page in lru:
                lru.remove(page)
        elif action == "release" and holders:
            pages = rng.sample(list(holders), rng.randint(1, len(holders)))
            arena.release(pages)
            for page in pages:
                holders[page] -= 1
                if not holders[page]:
                    del holders[page]
                    if arena.published[page]:
                        lru.append(page)
        elif action == "publish" and holders:
            arena.published[rng.choice(list(holders))] = 1
        elif action == "quarantine":
            alone = [page for page, count in holders.items() if count == 1 and not arena.published[page]]
            if alone:
                page = rng.choice(alone)
                arena.quarantine([page])
                del holders[page]
                quarantined.append(page)
        elif action == "restore" and quarantined:
            page = quarantined.pop()
            arena.restore([page])
            arena.release([page])
        arena.check_integrity()
        assert (arena.num_held, arena.num_cached) == (len(holders), len(lru))
        assert arena.num_available == 11 - len(holders) - len(quarantined)


def test_tail_pages_of_a_request_are_evicted_before_its_head() -> None:
    """The head of a prompt is what the next request shares."""
    events = Watch()
    hand = Hand(make_manager(full(page=4), pages=8, observer=events))
    kv = hand.kv
    old = hand.prefill(ids(12, seed=1), total=24)
    old_pages = list(held_pages(kv, old, 0).values())
    kv.close(old)
    new = hand.prefill(ids(12, seed=2), total=24)
    new_pages = list(held_pages(kv, new, 0).values())
    kv.close(new)
    hand.settle()
    assert kv.pool.arenas[0].num_cached == 6
    taken = kv.pool.acquire(0, 8)
    assert [page for _arena, page in events.evictions] == [*reversed(old_pages[:3]), *reversed(new_pages[:3])]
    kv.pool.release(0, taken)


def test_the_lru_does_not_grow_where_pages_are_used_again_and_again() -> None:
    arena, evicted = make_arena(9)
    pages = arena.acquire(8)
    publish(arena, pages)
    arena.release(pages)
    for _ in range(100):
        arena.retain(pages[2:5])
        arena.release(pages[2:5])
        arena.check_integrity()
    assert len(arena._lru) <= 2 * arena.num_pages
    arena.acquire(8)
    assert evicted == pages[:2] + pages[5:] + pages[2:5]
