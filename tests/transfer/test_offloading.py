"""What the driver does with tiers, on the real scheduler and a tier that does what the test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.kv.fakes import Engine, assert_at_rest, drafter, full, ids, make_manager, reference_text

from outrider.kv.layout import KVLayout
from outrider.scheduler import State
from outrider.transfer.cache_tier import CacheTier
from outrider.transfer.offloading import Offloading
from outrider.transfer.records import TransferLimits
from outrider.transfer.tier import Done, TierPage

LIMITS = TransferLimits(look_up_s=2.0, tier_s=20.0, pinned_share=0.25)
SIZE = 4


class ScriptedTier:
    """A tier whose operations end when the test says so."""

    batch_max = 3
    keys_max = 512

    def __init__(self, name: str = "scripted", *, is_local: bool = True) -> None:
        self.name = name
        self.is_local = is_local
        self.held: set[bytes] = set()
        self.open: dict[int, tuple[str, Sequence[Any]]] = {}
        self.done: list[Done] = []
        self.touched: list[bytes] = []

    def contains(self, key: bytes) -> bool:
        return self.is_local and key in self.held

    def touch(self, keys: Sequence[bytes]) -> None:
        self.touched += keys

    def look_up(self, number: int, keys: Sequence[bytes]) -> None:
        self.open[number] = ("look_up", keys)

    def put(self, number: int, pages: Sequence[TierPage]) -> None:
        self.open[number] = ("put", pages)

    def get(self, number: int, pages: Sequence[TierPage]) -> None:
        self.open[number] = ("get", pages)

    def end(self, what: str = "", *, works: bool = True) -> int:
        """End all open operations of a kind; returns their number."""
        ended = [number for number, (kind, _items) in self.open.items() if kind == what or not what]
        for number in ended:
            kind, items = self.open.pop(number)
            keys = [item if kind == "look_up" else item.key for item in items]
            if kind == "put" and works:
                self.held.update(keys)
            self.done.append(Done(number, tuple(works and (kind == "put" or key in self.held) for key in keys)))
        return len(ended)

    def poll(self) -> list[Done]:
        done, self.done = self.done, []
        return done

    def clear(self) -> None:
        self.held.clear()

    def fileno(self) -> int:
        return -1

    def close(self) -> None: ...


class Worker:
    """A scheduler with a fake target and one or more scripted tiers behind its device."""

    def __init__(self, *tiers: ScriptedTier, method: str = "", pages: int = 40, **config: Any) -> None:
        footprint = {} if not method else {"footprint": drafter(method, page=SIZE)}
        target = (full(page=SIZE),)
        layout = KVLayout(target=target, **footprint)
        self.tiers = tiers
        self.cache_tiers = [CacheTier(tier, layout) for tier in tiers]
        self.kv = make_manager(*target, pages=pages, tiers=self.cache_tiers, max_model_len=256, **footprint)
        self.engine = Engine(self.kv, **config)
        self.scheduler = self.engine.scheduler
        self.now_s = 0.0
        self.offloading = Offloading(self.cache_tiers, self.scheduler, limits=LIMITS, clock=lambda: self.now_s)

    def add(self, name: str, prompt: Sequence[int], **more: Any) -> None:
        self.engine.add(name, prompt, awaits_tiers=self.offloading.asks, **more)
        self.offloading.enter(name)

    def step(self, *, ends: bool = True) -> None:
        """Run one step as an engine does; with `ends`, whatever tiers were doing ends before it."""
        for tier in self.tiers if ends else ():
            tier.end()
        self.offloading.poll()
        self.offloading.check_deadlines(self.now_s)
        plan = self.scheduler.schedule()
        for name, loads in self.scheduler.take_loads():
            self.offloading.start(name, loads)
        updates = self.scheduler.commit(plan, self.engine._run(plan))
        self.engine._note(updates)
        self.offloading.store()

    def run(self, name: str, prompt: Sequence[int], **more: Any) -> list[int]:
        """Run a request to its end."""
        self.add(name, prompt, **more)
        for _ in range(60):
            self.step()
            if name in self.engine.finished:
                break
        self.settle()
        return self.engine.text[name]

    def settle(self) -> None:
        for _ in range(60):
            for tier in self.tiers:
                tier.end()
            self.offloading.poll()
            self.offloading.store()
            if self.offloading.is_idle:
                return

    @property
    def pins(self) -> int:
        return sum(self.kv.pool.pins.values())


def test_a_prompt_that_only_a_tier_holds_is_loaded_from_it() -> None:
    tier = ScriptedTier()
    worker = Worker(tier)
    prompt = ids(14)
    assert worker.run("a", prompt, max_tokens=4) == reference_text(prompt, 4)
    assert len(tier.held) == 4
    worker.kv.reset_cache()
    assert worker.run("b", prompt, max_tokens=4) == reference_text(prompt, 4)
    counters = worker.cache_tiers[0].counters
    assert (counters.loaded, counters.missed) == (3, 0)
    assert_at_rest(worker.kv)


def test_draft_groups_are_stored_and_loaded_with_the_target() -> None:
    worker = Worker(ScriptedTier(), method="chain_from_taps")
    prompt = ids(14)
    worker.run("a", prompt, max_tokens=4, k=2)
    worker.kv.reset_cache()
    worker.add("b", prompt, max_tokens=4, k=2)
    worker.step()
    groups = {page.group for _kind, pages in worker.tiers[0].open.values() for page in pages}
    assert groups == {0, 1}
    worker.step()
    request = worker.scheduler.requests["b"].kv
    assert (request.hit, request.groups[1].low) == (12, 0)


def test_loads_that_do_not_all_end_in_time_are_lost() -> None:
    worker = Worker(ScriptedTier())
    prompt = ids(30)
    worker.run("a", prompt, max_tokens=2)
    worker.kv.reset_cache()
    worker.add("b", prompt, max_tokens=2)
    worker.step()
    assert worker.offloading.deadlines_s == [20.0]
    gets = [number for number, (kind, _pages) in worker.tiers[0].open.items() if kind == "get"]
    assert len(gets) == 3, "the tier takes three pages at a time"
    # The last one never ends.
    _kind, pages = worker.tiers[0].open.pop(gets[0])
    worker.tiers[0].done.append(Done(gets[0], (True,) * len(pages)))
    worker.now_s = 19.0
    worker.step(ends=False)
    assert worker.scheduler.requests["b"].state is State.LOADING
    worker.now_s = 20.0
    worker.step(ends=False)
    assert worker.scheduler.requests["b"].state is not State.LOADING
    (given_up,) = worker.scheduler.take_given_up()
    assert worker.offloading.give_up("b") == set(gets[1:])
    for _ in range(12):
        worker.step(ends=False)
    assert worker.engine.text["b"] == reference_text(prompt, 2)
    worker.tiers[0].end("get")
    assert set(worker.offloading.poll()) >= set(gets[1:])
    worker.kv.restore_quarantined(given_up.quarantined)
    worker.settle()
    assert_at_rest(worker.kv)


def test_a_load_that_was_given_up_is_not_taken_for_a_later_one_of_the_same_page() -> None:
    worker = Worker(ScriptedTier())
    prompt = ids(6)
    worker.run("a", prompt, max_tokens=2)
    worker.kv.reset_cache()
    arrived: list[str] = []
    worker.scheduler.load_arrived = lambda sequence, load: arrived.append(sequence)  # type: ignore[method-assign]
    worker.add("b", prompt, max_tokens=2)
    worker.step()
    (load,) = worker.scheduler.requests["b"].kv.loads
    (first,) = worker.offloading.give_up("b")
    worker.offloading.start("b", [load])
    worker.tiers[0].done.append(Done(first, (True,)))
    assert worker.offloading.poll() == [first]
    assert arrived == []
    del worker.tiers[0].open[first]
    worker.tiers[0].end("get")
    worker.offloading.poll()
    assert arrived == ["b"]


def test_no_more_pages_are_pinned_than_the_limits_allow_and_evicted_ones_are_not_stored() -> None:
    worker = Worker(ScriptedTier(), pages=16)
    worker.add("a", ids(40), max_tokens=2)
    for _ in range(8):
        worker.step(ends=False)
    assert "a" in worker.engine.finished
    assert worker.pins == 4, "a quarter of the pages"
    # The next text needs all but the pinned pages, and evicts what waits to be stored.
    worker.add("b", ids(40, seed=1), max_tokens=2)
    for _ in range(8):
        worker.step(ends=False)
    assert "b" in worker.engine.finished
    worker.settle()
    assert worker.pins == 0
    assert worker.cache_tiers[0].counters.not_stored > 0
    assert_at_rest(worker.kv)


def test_a_pinned_page_survives_that_everything_is_given_up() -> None:
    worker = Worker(ScriptedTier(), pages=16)
    worker.add("a", ids(20), max_tokens=4)
    worker.step(ends=False)
    pages = {page for (_arena, page) in worker.kv.pool.pins}
    assert pages
    worker.scheduler.abandon(None)
    arena = worker.kv.pool.arenas[0]
    assert pages.isdisjoint(arena.acquire(arena.num_available)), "nobody else gets them while they are copied"


def test_a_store_is_asked_before_a_request_is_admitted_and_its_answer_is_what_the_search_sees() -> None:
    store = ScriptedTier("store", is_local=False)
    worker = Worker(store)
    prompt = ids(14)
    worker.run("a", prompt, max_tokens=4)
    worker.kv.reset_cache()
    worker.add("b", prompt, max_tokens=4)
    assert [kind for kind, _keys in store.open.values()] == ["look_up"]
    worker.step(ends=False)
    assert worker.scheduler.requests["b"].state is State.FETCHING
    worker.step()
    assert [kind for kind, _pages in store.open.values()] == ["get"]
    worker.step()
    assert worker.scheduler.requests["b"].kv.hit == 12
    # What the device holds is not asked for.
    worker.settle()
    worker.add("c", prompt, max_tokens=4)
    assert all(kind != "look_up" for kind, _pages in store.open.values())
    assert worker.scheduler.requests["c"].state is State.WAITING


def test_a_store_that_does_not_answer_in_time_is_a_miss() -> None:
    store = ScriptedTier("store", is_local=False)
    worker = Worker(store)
    prompt = ids(14)
    worker.run("a", prompt, max_tokens=4)
    worker.kv.reset_cache()
    worker.add("b", prompt, max_tokens=4)
    assert worker.offloading.deadlines_s == [2.0]
    worker.now_s = 2.0
    worker.step(ends=False)
    assert worker.scheduler.requests["b"].kv.hit == 0
    store.end("look_up")
    worker.offloading.poll()  # an answer that comes later changes nothing
    for _ in range(8):
        worker.step()
    assert worker.engine.text["b"] == reference_text(prompt, 4)


def test_what_a_store_has_lost_by_then_is_computed() -> None:
    store = ScriptedTier("store", is_local=False)
    worker = Worker(store)
    prompt = ids(14)
    worker.run("a", prompt, max_tokens=4)
    worker.kv.reset_cache()
    worker.add("b", prompt, max_tokens=4)
    worker.step()
    store.held.clear()
    assert worker.run("c", ids(5, seed=3), max_tokens=2) == reference_text(ids(5, seed=3), 2)
    for _ in range(8):
        worker.step()
    assert worker.engine.text["b"] == reference_text(prompt, 4)
    assert worker.cache_tiers[0].counters.missed == 3


def test_the_nearest_tier_that_has_a_page_is_asked() -> None:
    host, store = ScriptedTier("host"), ScriptedTier("store", is_local=False)
    worker = Worker(host, store)
    prompt = ids(14)
    worker.run("a", prompt, max_tokens=4)
    assert host.held == store.held
    host.held = set(sorted(host.held)[:1])
    worker.kv.reset_cache()
    worker.run("b", prompt, max_tokens=4)
    near, far = (tier.counters for tier in worker.cache_tiers)
    assert near.loaded + far.loaded == 3
    assert near.loaded <= 1 <= far.loaded


def test_the_front_of_a_prompt_is_touched_last() -> None:
    worker = Worker(ScriptedTier())
    worker.run("a", ids(14), max_tokens=2)
    worker.add("b", ids(14), max_tokens=2)
    keys = [worker.cache_tiers[0].key(0, key) for _g, _n, key in worker.offloading._prompt_keys(kv_of(worker, "b"))]
    assert worker.tiers[0].touched[-3:] == keys[::-1]


def kv_of(worker: Worker, name: str) -> Any:
    return worker.scheduler.requests[name].kv


def test_an_unused_worker_waits_for_nothing() -> None:
    worker = Worker(ScriptedTier())
    assert worker.offloading.is_idle
    assert worker.offloading.deadlines_s == []
    assert not worker.offloading.asks
