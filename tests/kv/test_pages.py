"""The arena: who gets a page, who loses one, and that none is ever in two places."""

from __future__ import annotations

from random import Random

import pytest
from tests.kv.fakes import Hand, Watch, full, held_pages, ids, make_manager

from outrider.errors import OutOfPages
from outrider.kv.pages import NULL_PAGE, PageArena


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


@pytest.mark.parametrize(
    "break_it",
    [
        lambda arena, held: arena.refs.__setitem__(held, 0),
        lambda arena, held: arena.refs.__setitem__(5, 1),
        lambda arena, held: arena.quarantined.add(held),
        lambda arena, held: arena.quarantined.add(5),
        lambda arena, held: arena.published.__setitem__(5, 1),
        lambda arena, held: arena.published.__setitem__(NULL_PAGE, 1),
        lambda arena, held: arena.refs.__setitem__(NULL_PAGE, 0),
    ],
    ids=[
        "held page lost",
        "free page held",
        "held page quarantined",
        "free page quarantined",
        "free page published",
        "null page published",
        "null page released",
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
    actions = ("acquire", "retain", "release", "publish", "quarantine", "restore", "forget")
    for _ in range(600):
        (action,) = rng.choices(actions, weights=(6, 3, 6, 3, 3, 3, 1))
        if action == "acquire":
            count = rng.randint(0, 5)
            free = 11 - len(holders) - len(lru) - len(quarantined)
            out: list[int] = []
            evicted.clear()
            if count > free + len(lru):
                with pytest.raises(OutOfPages) as shortage:
                    arena.acquire(count)
                assert (shortage.value.arena, shortage.value.missing_pages) == (3, count - free - len(lru))
            else:
                out, lru = lru[: max(0, count - free)], lru[max(0, count - free) :]
                pages = arena.acquire(count)
                assert len(set(pages)) == count
                assert not set(pages) & (holders.keys() | set(lru) | set(quarantined) | {NULL_PAGE})
                holders.update(dict.fromkeys(pages, 1))
            assert evicted == out
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
        elif action == "forget":
            arena.forget_cached()
            lru.clear()
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
