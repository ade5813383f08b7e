"""What the driver does with tiers: looks prompts up, loads pages that were found, and stores pages that are published.

    prompt ──enter──▶ keys of all groups ──look_up──▶ found ──▶ hit search (scheduler) ──loads──▶ get ──▶ arrived
    commit ──▶ pages that entered the index ──store──▶ wanted by the tier's policy ──▶ pinned ──put──▶ unpinned

Target and draft groups take the same way: a page of a drafter is looked up, stored and loaded with the page of the
target that lies beside it, so that a hit from a tier drafts like a hit on the device.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from outrider.kv.ledger import Load, SequenceKV
from outrider.kv.publication import NewPage
from outrider.scheduler import Scheduler
from outrider.transfer.cache_tier import CacheTier
from outrider.transfer.records import TransferLimits
from outrider.transfer.tier import Done, TierPage


class TierChecks(Protocol):
    """What a checker is told about pages that go to tiers and come from them."""

    def offered(self, tier: CacheTier, new: NewPage, *, wanted: bool) -> None:
        """Note a page that was published while this tier could take it, and whether the tier's policy keeps it."""

    def found(self, sequence: SequenceKV, group: int, page_number: int, key: bytes) -> None:
        """Note that a tier said that it holds a page of a sequence's prompt."""

    def loaded(self, sequence: str, load: Load) -> None:
        """Note that a tier has written a page, whose trailer was right."""

    def stored(self, new: NewPage) -> None:
        """Note that a tier has copied a page, which is still pinned."""


class Found:
    """Pages of one prompt that tiers said that they hold: an `outrider.kv.prefix.Tier` of a single sequence."""

    def __init__(self) -> None:
        self.tiers: dict[tuple[int, bytes], CacheTier] = {}

    def contains(self, group: int, key: bytes) -> bool:
        return (group, key) in self.tiers


class _Get(NamedTuple):
    tier: CacheTier
    sequence: str
    loads: list[Load]
    pages: list[TierPage]
    started_s: float


class _Put(NamedTuple):
    tier: CacheTier
    pages: list[NewPage]
    started_s: float


class _Question(NamedTuple):
    tier: CacheTier
    sequence: str
    keys: list[tuple[int, int, bytes]]
    """(group, page number, key) of each page that is asked for."""
    started_s: float


class Offloading:
    def __init__(
        self,
        tiers: Sequence[CacheTier],
        scheduler: Scheduler,
        *,
        limits: TransferLimits,
        clock: Callable[[], float],
        checks: TierChecks | None = None,
    ) -> None:
        """`tiers`: the nearest first."""
        self.tiers = tiers
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._layout = scheduler.kv.layout
        self._limits = limits
        self._clock = clock
        self._checks = checks
        self._numbers = itertools.count(1)
        self._gets: dict[int, _Get] = {}
        self._given_up: set[int] = set()
        """Gets whose request does not wait for them any more."""
        self._ends_s: dict[str, float] = {}
        """When the loads of a sequence are given up."""
        self._puts: dict[int, _Put] = {}
        self._questions: dict[int, _Question] = {}
        self._asked: dict[str, tuple[Found, float]] = {}
        """What was found for a request that waits for answers, and until when it waits."""
        self._pinned: Counter[int] = Counter()
        """Number of pages of each arena that puts hold."""
        pages = [arena.num_pages for arena in self._kv.pool.arenas]
        self._pinned_max = [max(1, int(limits.pinned_share * (count - 1))) for count in pages]
        self._to_store: dict[str, deque[NewPage]] = {tier.name: deque(maxlen=sum(pages)) for tier in tiers}

    # ---- looking up --------------------------------------------------------------------------------

    @property
    def asks(self) -> bool:
        """Whether some tier has to be asked what it holds, before a request is admitted."""
        return any(not tier.tier.is_local for tier in self.tiers)

    def enter(self, sequence: str) -> None:
        """Look up the prompt of a new request. If it is FETCHING, `Scheduler.looked_up` follows within the limit."""
        request = self._scheduler.requests[sequence]
        keys = list(self._prompt_keys(request.kv))
        for tier in self.tiers:
            if tier.tier.is_local:
                # The front of a text is of use to more texts than its end, so it is given up last.
                tier.tier.touch([tier.key(group, key) for group, _number, key in reversed(keys)])
        if not request.spec.awaits_tiers:
            return
        now_s = self._clock()
        self._asked[sequence] = (Found(), now_s + self._limits.look_up_s)
        near = [tier for tier in self.tiers if tier.tier.is_local]
        missing = [
            (group, number, key)
            for group, number, key in keys
            if key not in self._kv.pool.indexes[group].pages
            and not any(tier.tier.contains(tier.key(group, key)) for tier in near)
        ]
        for tier in self.tiers:
            for first in range(0, 0 if tier.tier.is_local else len(missing), tier.tier.keys_max):
                part = missing[first : first + tier.tier.keys_max]
                question = next(self._numbers)
                self._questions[question] = _Question(tier, sequence, part, now_s)
                tier.counters.looked_up += len(part)
                tier.tier.look_up(question, [tier.key(group, key) for group, _number, key in part])
        self._maybe_answered(sequence)

    def _prompt_keys(self, sequence: SequenceKV) -> Iterator[tuple[int, int, bytes]]:
        """Yields group, page number and key of every page of the prompt whose key is known."""
        chain, tokens, layout = sequence.chain, sequence.tokens, self._layout
        chain.extend(tokens, len(tokens))
        for group, spec in enumerate(layout.groups):
            stop = (len(tokens) - layout.reach[group]) // spec.page_tokens
            keys = chain.keys(tokens, spec.page_tokens, layout.reach[group], 0, stop) if stop > 0 else []
            for number, key in enumerate(keys):
                yield group, number, key

    def _answered(self, number: int, outcomes: Sequence[bool]) -> None:
        question = self._questions.pop(number)
        counters = question.tier.counters
        counters.look_up_s += self._clock() - question.started_s
        counters.found += sum(outcomes)
        waiting = self._asked.get(question.sequence)
        request = self._scheduler.requests.get(question.sequence)
        if waiting is None or request is None:
            return  # too late, or the request is gone
        for (group, page_number, key), held in zip(question.keys, outcomes, strict=True):
            if held:
                waiting[0].tiers.setdefault((group, key), question.tier)
                if self._checks is not None:
                    self._checks.found(request.kv, group, page_number, key)
        self._maybe_answered(question.sequence)

    def _maybe_answered(self, sequence: str) -> None:
        if not any(question.sequence == sequence for question in self._questions.values()):
            self._tell(sequence)

    def _tell(self, sequence: str) -> None:
        """Let a request go on with what was found for it so far."""
        found, _end_s = self._asked.pop(sequence)
        if sequence in self._scheduler.requests:
            self._scheduler.looked_up(sequence, found if found.tiers else None)

    # ---- loading -----------------------------------------------------------------------------------

    def start(self, sequence: str, loads: Sequence[Load]) -> None:
        """Start the loads of a request that was admitted; the nearest tier that has a page is asked for it."""
        kv, now_s = self._scheduler.requests[sequence].kv, self._clock()
        parts: dict[str, list[tuple[Load, TierPage]]] = {}
        missing = []
        for load in loads:
            assert load.key is not None
            tier = self._holder(kv, load.group, load.key)
            if tier is None:
                missing.append(load)
                continue
            number = load.interval.start // self._layout.groups[load.group].page_tokens
            page = TierPage(tier.key(load.group, load.key), load.group, kv.groups[load.group].pages[number])
            parts.setdefault(tier.name, []).append((load, page))
        for tier in self.tiers:
            part = parts.get(tier.name, [])
            for first in range(0, len(part), tier.tier.batch_max):
                batch = part[first : first + tier.tier.batch_max]
                number, pages = next(self._numbers), [page for _load, page in batch]
                self._gets[number] = _Get(tier, sequence, [load for load, _page in batch], pages, now_s)
                self._ends_s[sequence] = now_s + self._limits.tier_s
                tier.tier.get(number, pages)
        for load in missing:
            self._scheduler.load_failed(sequence, load)

    def _holder(self, kv: SequenceKV, group: int, key: bytes) -> CacheTier | None:
        for tier in self.tiers:
            if tier.tier.is_local and tier.tier.contains(tier.key(group, key)):
                return tier
        return kv.found.tiers.get((group, key)) if isinstance(kv.found, Found) else None

    def _got(self, done: Done) -> None:
        get = self._gets.pop(done.number)
        given_up = done.number in self._given_up
        self._given_up.discard(done.number)
        counters, groups = get.tier.counters, self._layout.groups
        counters.load_s += self._clock() - get.started_s
        counters.refused += done.refused
        counters.missed += len(done.outcomes) - sum(done.outcomes)
        if not given_up and not any(number not in self._given_up for number in self._gets_of(get.sequence)):
            self._ends_s.pop(get.sequence, None)
        for load, is_there in zip(get.loads, done.outcomes, strict=True):
            if is_there:
                counters.loaded += 1
                counters.loaded_bytes += groups[load.group].page_bytes
            if given_up:
                continue
            if is_there and self._checks is not None:
                self._checks.loaded(get.sequence, load)
            if is_there:
                self._scheduler.load_arrived(get.sequence, load)
            else:
                self._scheduler.load_failed(get.sequence, load)

    def give_up(self, sequence: str) -> set[int]:
        """Forget whose the loads of a sequence are; returns their numbers. They may still write to its pages, and must
        not be taken for loads of the same KV that the sequence begins later."""
        numbers = {number for number in self._gets_of(sequence) if number not in self._given_up}
        self._given_up |= numbers
        self._ends_s.pop(sequence, None)
        return numbers

    def _gets_of(self, sequence: str) -> list[int]:
        return [number for number, get in self._gets.items() if get.sequence == sequence]

    # ---- storing -----------------------------------------------------------------------------------

    def store(self) -> None:
        """Have tiers take over what has entered the index, as far as their policies keep it."""
        for new in self._kv.progress.take_new_pages():
            for tier in self.tiers:
                wanted = tier.wants(new.group, new.page_number, new.marks)
                if self._checks is not None:
                    self._checks.offered(tier, new, wanted=wanted)
                if wanted:
                    self._to_store[tier.name].append(new)
        for tier in self.tiers:
            while self._to_store[tier.name]:
                batch = self._take_batch(tier)
                if not batch:
                    break
                number = next(self._numbers)
                self._puts[number] = _Put(tier, batch, self._clock())
                tier.tier.put(number, [tier.page(new) for new in batch])

    def _take_batch(self, tier: CacheTier) -> list[NewPage]:
        """Pin the next pages to store, as many as may be pinned at once; pages that were evicted meanwhile are not
        stored."""
        waiting, pool = self._to_store[tier.name], self._kv.pool
        batch: list[NewPage] = []
        while waiting and len(batch) < tier.tier.batch_max:
            new, arena = waiting[0], self._layout.arena_of[waiting[0].group]
            if not pool.is_published(new.group, new.page, new.key):
                tier.counters.not_stored += 1
            elif tier.tier.is_local and tier.tier.contains(tier.key(new.group, new.key)):
                pass
            elif self._pinned[arena] >= self._pinned_max[arena]:
                break
            else:
                pool.pin(new.group, new.page)
                self._pinned[arena] += 1
                batch.append(new)
            waiting.popleft()
        return batch

    def _put_ended(self, done: Done) -> None:
        put = self._puts.pop(done.number)
        counters = put.tier.counters
        counters.store_s += self._clock() - put.started_s
        for new, is_stored in zip(put.pages, done.outcomes, strict=True):
            if self._checks is not None:
                self._checks.stored(new)
            self._kv.pool.unpin(new.group, new.page)
            self._pinned[self._layout.arena_of[new.group]] -= 1
            counters.stored += is_stored
            counters.not_stored += not is_stored
            counters.stored_bytes += is_stored * self._layout.groups[new.group].page_bytes

    def clear(self) -> None:
        """Empty the tiers that belong to this worker alone."""
        for tier in self.tiers:
            tier.tier.clear()

    # ---- time --------------------------------------------------------------------------------------

    def poll(self) -> list[int]:
        """Take in what tiers have done; returns the numbers of the gets that have ended."""
        ended = []
        for tier in self.tiers:
            for done in tier.tier.poll():
                if done.number in self._gets:
                    ended.append(done.number)
                    self._got(done)
                elif done.number in self._puts:
                    self._put_ended(done)
                elif done.number in self._questions:
                    self._answered(done.number, done.outcomes)
        return ended

    def check_deadlines(self, now_s: float) -> None:
        for sequence in [name for name, (_found, end_s) in self._asked.items() if end_s <= now_s]:
            self._tell(sequence)
        for sequence in [name for name, end_s in self._ends_s.items() if end_s <= now_s]:
            del self._ends_s[sequence]
            self._scheduler.load_lost(sequence)

    @property
    def deadlines_s(self) -> list[float]:
        return [*self._ends_s.values(), *(end_s for _found, end_s in self._asked.values())]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being copied or asked for."""
        return not (self._gets or self._puts or self._questions)

    def close(self) -> None:
        for tier in self.tiers:
            tier.tier.close()
