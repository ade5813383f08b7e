"""The invariants I1 to I6, I8 and I9, checked on tables, slot mappings and intervals (level `plan`).

Two streams come in. The KV manager reports what it decides (the KVObserver methods): pages taken,
shared, published, let go. The runner reports what a step really does: copies, reads, writes. The ledger's
claims are compared with the shadow after every commit. I7, equal tokens, is the oracle's to check.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from enum import Enum

from outrider.errors import InvariantViolation
from outrider.kv.intervals import Interval
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.ledger import SequenceKV
from outrider.kv.manager import KVManager
from outrider.kv.observer import Hit, KVObserver
from outrider.kv.pages import SINK
from outrider.kv.plan import PageCopy
from outrider.sanitizer.expected import ExpectedHits
from outrider.sanitizer.shadow import (
    DURABLE,
    NOBODY,
    SCRATCH,
    PageShadow,
    TokenHashes,
    Writer,
    namespace_seed,
)

log = logging.getLogger("outrider.sanitizer")


class Mode(Enum):
    """What to do on a violation. `off` means: attach no sanitizer at all."""

    OFF = "off"
    LOG = "log"
    RAISE = "raise"


class Sanitizer(KVObserver):
    def __init__(self, layout: KVLayout, config: KVConfig, *, mode: Mode = Mode.RAISE) -> None:
        self.layout = layout
        self.config = config
        self.mode = mode
        self.step = -1
        self.violations: list[InvariantViolation] = []
        self.tier_holds: Callable[[int, int], bool] = lambda group, identity: False
        """(group, identity of a page's last slot): is that page in another tier?"""
        self._manager: KVManager | None = None
        slots = [1] * len(config.arena_pages)
        for group, spec in enumerate(layout.groups):
            arena = layout.arena_of[group]
            slots[arena] = max(slots[arena], spec.page_tokens)
        self._slots = slots
        self._pages = [
            [PageShadow(slots[arena]) for _ in range(count)] for arena, count in enumerate(config.arena_pages)
        ]
        self._available: list[dict[int, int]] = [{} for _ in layout.groups]
        """Per group: slot identity -> published device pages that hold it."""
        self._expected = ExpectedHits(layout, self._available, lambda g, i: self.tier_holds(g, i))
        self._planned: dict[str, TokenHashes] = {}
        self._run: dict[str, TokenHashes] = {}
        self._verified: dict[str, list[int]] = {}
        """Per sequence and group: the ledger's durable end that was last compared with the shadow."""
        self._lows: dict[str, list[int]] = {}
        self._hits: dict[str, tuple[Hit, Hit]] = {}
        """Between search and admission: what was found, and what should have been."""
        # Not the layout's own list of reaches: the keys that are checked here are made from that one.
        drafts = len(layout.groups) - layout.num_target
        self._reach = [0] * layout.num_target + [layout.footprint.token_reach] * drafts

    def bind(self, manager: KVManager) -> None:
        """The manager whose ledger is compared with the shadow."""
        self._manager = manager

    def track(self, sequence: str, tokens: array[int], namespace: tuple[str, str]) -> None:
        """The runner's own tokens of a sequence: what it feeds the model, ahead of the ledger."""
        self._run[sequence] = TokenHashes(self._seed(namespace), tokens)

    # ---- reporting ---------------------------------------------------------------------------------

    def _fail(
        self,
        invariant: str,
        what: str,
        *,
        request: str = "-",
        group: int = -1,
        position: int = -1,
        page: int = -1,
        writer: Writer = NOBODY,
    ) -> None:
        name = f"{group} ({self.layout.groups[group].name})" if group >= 0 else "-"
        violation = InvariantViolation(
            invariant,
            f"{invariant} broken at step {self.step}: {what} [request {request}, group {name}, position "
            f"{position if position >= 0 else '-'}, page {page if page >= 0 else '-'}, last writer: {writer}]",
        )
        self.violations.append(violation)
        if self.mode is Mode.RAISE:
            raise violation
        log.error("%s", violation)

    def _seed(self, namespace: tuple[str, str]) -> int:
        identity = self.config.identity
        return namespace_seed(identity.weights, identity.dtype, identity.layout, *namespace)

    def _hashes(self, sequence: SequenceKV) -> list[int]:
        known = self._planned.get(sequence.id)
        if known is None:
            known = self._planned[sequence.id] = TokenHashes(self._seed(sequence.namespace), sequence.tokens)
        return known.extend()

    def _page(self, group: int, page: int) -> PageShadow:
        return self._pages[self.layout.arena_of[group]][page]

    # ---- what the manager decides ------------------------------------------------------------------

    def acquired(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            shadow = self._pages[arena][page]
            if page == SINK or shadow.refs or shadow.quarantined:
                self._fail("I5", "a page was handed out that is not free", page=page, writer=shadow.writers[0])
            shadow.refs = 1
            shadow.clear(self._slots[arena])

    def retained(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            self._pages[arena][page].refs += 1

    def source_held(self, arena: int, page: int) -> None:
        self._pages[arena][page].sources += 1

    def source_let_go(self, arena: int, page: int) -> None:
        self._pages[arena][page].sources -= 1

    def deferred(self, arena: int, pages: Sequence[int], step: int) -> None:
        for page in pages:
            shadow = self._pages[arena][page]
            shadow.pending += 1
            if shadow.pending > shadow.refs:
                self._fail(
                    "I5",
                    "a page was let go of more often than it was held",
                    page=page,
                    writer=shadow.writers[0],
                )

    def releasing(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            shadow = self._pages[arena][page]
            shadow.pending -= shadow.pending > 0
            shadow.refs -= 1
            if shadow.refs < 0:
                self._fail(
                    "I5",
                    "a page was let go of more often than it was held",
                    page=page,
                    writer=shadow.writers[0],
                )

    def quarantined(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            shadow = self._pages[arena][page]
            if shadow.refs != 1:
                self._fail("I5", "a page set aside is held by others", page=page, writer=shadow.writers[0])
            shadow.refs, shadow.quarantined = 0, True

    def restored(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            self._pages[arena][page].quarantined = False

    def evicted(self, arena: int, page: int) -> None:
        shadow = self._pages[arena][page]
        if shadow.refs:
            self._fail("I5", "a page in use was evicted", page=page, writer=shadow.writers[0])
        self._unpublish(shadow)

    def _unpublish(self, shadow: PageShadow) -> None:
        if not shadow.published:
            return
        shadow.published = False
        available = self._available[shadow.group]
        for identity in shadow.ids[: self.layout.groups[shadow.group].page_tokens]:
            available[identity] -= 1
            if not available[identity]:
                del available[identity]

    def cache_reset(self) -> None:
        for arena in self._pages:
            for shadow in arena:
                self._unpublish(shadow)

    def ended(self, sequence: SequenceKV) -> None:
        self._verified.pop(sequence.id, None)
        self._lows.pop(sequence.id, None)

    def forget(self, sequence: str) -> None:
        self._planned.pop(sequence, None)
        self._run.pop(sequence, None)

    def admitting(self, sequence: SequenceKV, hit: Hit, *, use_cache: bool, may_draft: bool) -> None:
        """I9: the hit equals a slot-by-slot search over what is published."""
        limit = len(sequence.tokens) - 1 if use_cache else 0
        expected = self._expected.search(self._hashes(sequence), limit, draft=may_draft)
        self._hits[sequence.id] = (hit, expected)

    def admitted(self, sequence: SequenceKV) -> None:
        """Compared last, so that a page with wrong content is reported as such and not as a wrong length."""
        hit, expected = self._hits.pop(sequence.id)
        if hit != expected:
            self._fail(
                "I9",
                f"the hit is {hit.end} with drafts {[str(i) for i in hit.draft]} and {hit.tap_rows} tap row(s); "
                f"what is published gives {expected.end} with {[str(i) for i in expected.draft]} and "
                f"{expected.tap_rows}",
                request=sequence.id,
                position=min(hit.end, expected.end),
            )

    def already_published(self, sequence: SequenceKV, group: int, page_number: int, page: int) -> None:
        """I2: the page that the index holds under this sequence's key is the same page."""
        self.shared(sequence, group, page_number, page, self.layout.groups[group].page_tokens)

    def shared(self, sequence: SequenceKV, group: int, page_number: int, page: int, slots: int) -> None:
        """I2: a page that is hit holds what its key says."""
        shadow, size = self._page(group, page), self.layout.groups[group].page_tokens
        start = page_number * size
        first = start + 1 + self._reach[group]
        if shadow.ids[:slots] == self._hashes(sequence)[first : first + slots] and shadow.published:
            return
        wrong = self._first_difference(shadow.ids[:slots], self._hashes(sequence)[first : first + slots])
        self._fail(
            "I2",
            "a hit names a page whose content is not what its key says",
            request=sequence.id,
            group=group,
            position=start + wrong,
            page=page,
            writer=shadow.writers[min(wrong, slots - 1)],
        )

    @staticmethod
    def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
        for place, (one, other) in enumerate(zip(left, right, strict=False)):
            if one != other:
                return place
        return min(len(left), len(right))

    def published(self, sequence: SequenceKV, group: int, page_number: int, page: int, key: bytes) -> None:
        """I2: only durable slots, of this very sequence, enter the index."""
        shadow, size = self._page(group, page), self.layout.groups[group].page_tokens
        hashes = self._hashes(sequence)
        for offset in range(size):
            position = page_number * size + offset
            place = position + 1 + self._reach[group]
            wanted = hashes[place] if place < len(hashes) else None
            if page == SINK or shadow.states[offset] != DURABLE or shadow.ids[offset] != wanted:
                self._fail(
                    "I2",
                    "a published page holds a slot that is not durable for its sequence",
                    request=sequence.id,
                    group=group,
                    position=position,
                    page=page,
                    writer=shadow.writers[offset],
                )
        reach = self._reach[group]
        end = (page_number + 1) * size
        if reach and not key.endswith(sequence.tokens[end : end + reach].tobytes()):
            self._fail(
                "I2",
                "the key does not name the later tokens that the page depends on",
                request=sequence.id,
                group=group,
                position=end - 1,
                page=page,
                writer=shadow.writers[size - 1],
            )
        shadow.published = True
        shadow.group = group
        available = self._available[group]
        for identity in shadow.ids[:size]:
            available[identity] = available.get(identity, 0) + 1

    def imported(self, sequence: SequenceKV, group: int, interval: Interval) -> None:
        """I6: what arrived carries the identity that the sender had for it."""
        size, reach = self.layout.groups[group].page_tokens, self._reach[group]
        hashes, pages = self._hashes(sequence), sequence.groups[group].pages
        for position in range(interval.start, interval.end):
            page = pages[position // size]
            shadow, offset = self._page(group, page), position % size
            place = position + 1 + reach
            wanted = hashes[place] if place < len(hashes) else None
            if shadow.states[offset] != DURABLE or shadow.ids[offset] != wanted:
                self._fail(
                    "I6",
                    "a slot is taken over from a transfer that did not bring it",
                    request=sequence.id,
                    group=group,
                    position=position,
                    page=page,
                    writer=shadow.writers[offset],
                )

    # ---- what a step does --------------------------------------------------------------------------

    def copied(self, copy: PageCopy) -> None:
        """A page is copied before the step's rows run."""
        source, target = self._page(copy.group, copy.source), self._page(copy.group, copy.destination)
        for offset in range(copy.first, copy.stop):
            if source.states[offset] != DURABLE:
                self._fail(
                    "I3",
                    "a copy reads a slot that is not durable",
                    group=copy.group,
                    page=copy.source,
                    writer=source.writers[offset],
                )
        if target.published or target.refs - target.pending > 1 or copy.destination == SINK:
            self._fail(
                "I1",
                "a copy writes to a published or shared page",
                group=copy.group,
                page=copy.destination,
                writer=target.writers[0],
            )
        target.group = copy.group
        span = slice(copy.first, copy.stop)
        target.ids[span] = source.ids[span]
        target.states[span] = source.states[span]
        writer = Writer("-", self.step, f"copy of page {copy.source}")
        target.writers[span] = [writer] * (copy.stop - copy.first)

    def read(self, request: str, group: int, interval: Interval, table: Sequence[int], *, scratch_from: int) -> None:
        """I3: durable slots of this identity below scratch_from, own scratch of this step from there on."""
        size, reach = self.layout.groups[group].page_tokens, self._reach[group]
        upto = self._run[request].extend()
        position = interval.start
        while position < interval.end:
            number, offset = divmod(position, size)
            stop = min(size, offset + interval.end - position)
            page = table[number] if number < len(table) else SINK
            if page == SINK:
                self._fail(
                    "I3",
                    "a read of the sink: the slot is not held",
                    request=request,
                    group=group,
                    position=position,
                    page=page,
                )
                return
            shadow = self._page(group, page)
            durable = min(stop, max(offset, offset + scratch_from - position))
            count, first = durable - offset, position + 1 + reach
            if (
                shadow.ids[offset:durable] != upto[first : first + count]
                or shadow.states.count(DURABLE, offset, durable) != count
                or any((w.request, w.step) != (request, self.step) for w in shadow.writers[durable:stop])
                or shadow.refs == 0
            ):
                self._bad_read(request, group, position, page, offset, durable, stop)
            position += stop - offset

    def _bad_read(
        self, request: str, group: int, position: int, page: int, offset: int, durable: int, stop: int
    ) -> None:
        shadow, reach = self._page(group, page), self._reach[group]
        upto = self._run[request].extend()
        for place in range(offset, stop):
            at = position + place - offset
            state, writer = shadow.states[place], shadow.writers[place]
            expected = upto[at + 1 + reach] if at + 1 + reach < len(upto) else None
            if place >= durable:
                wrong = (writer.request, writer.step) != (request, self.step)
                what = "a read of scratch that this request did not write in this step"
            else:
                wrong = state != DURABLE or shadow.ids[place] != expected or shadow.refs == 0
                what = (
                    "a read of a slot that nobody holds"
                    if shadow.refs == 0
                    else "a read of a slot that is not durable"
                    if state != DURABLE
                    else "a read of a slot that belongs to another sequence of tokens"
                )
            if wrong:
                self._fail("I3", what, request=request, group=group, position=at, page=page, writer=writer)
                return

    def write(
        self,
        request: str,
        group: int,
        interval: Interval,
        table: Sequence[int],
        what: str,
        *,
        ids: Sequence[int] | None = None,
        durable: bool = False,
    ) -> None:
        """I1: inside the writer's reservation, below the limit, never on a published or shared page."""
        size, limit = self.layout.groups[group].page_tokens, self._limit(group)
        writer = Writer(request, self.step, what)
        position = interval.start
        while position < interval.end:
            number, offset = divmod(position, size)
            stop = min(size, offset + interval.end - position)
            page = table[number] if number < len(table) else SINK
            self._check_write(request, group, position, page, number, position + stop - offset > limit, limit)
            shadow = self._page(group, page)
            count = stop - offset
            done = position - interval.start
            shadow.group = group
            shadow.states[offset:stop] = bytes([DURABLE if durable else SCRATCH]) * count
            shadow.ids[offset:stop] = ids[done : done + count] if ids is not None else [0] * count
            shadow.writers[offset:stop] = [writer] * count
            position += count

    def _limit(self, group: int) -> int:
        limit = self.config.max_model_len
        drafter = self.layout.footprint.max_len
        return min(limit, drafter) if group >= self.layout.num_target and drafter is not None else limit

    def _check_write(
        self, request: str, group: int, position: int, page: int, number: int, past: bool, limit: int
    ) -> None:
        shadow = self._page(group, page)
        assert self._manager is not None
        sequence = self._manager.sequences.get(request)
        state = sequence.groups[group] if sequence is not None and sequence.admitted else None
        reserved = state is not None and number < len(state.pages) and state.pages[number] == page
        what = None
        if past:
            what = f"a write at or past the group's limit {limit}"
            position = max(position, limit)
        elif page == SINK or not (reserved or (state is None and shadow.pending)):
            # A request that ended while its step was in flight writes to pages that wait for that step.
            what = "a write outside the writer's reservation"
        elif shadow.published:
            what = "a write to a published page"
        elif shadow.refs - shadow.pending - shadow.sources > 1:
            what = "a write to a page that others hold too"
        if what is not None:
            self._fail(
                "I1",
                what,
                request=request,
                group=group,
                position=position,
                page=page,
                writer=shadow.writers[position % self.layout.groups[group].page_tokens],
            )

    def identities(self, request: str, group: int, interval: Interval) -> list[int]:
        """Identities of positions whose tokens the runner knows; shorter if it does not know them all."""
        first = interval.start + 1 + self._reach[group]
        return self._run[request].extend()[first : first + interval.size]

    def draft_identities(self, request: str, start: int, tokens: Sequence[int]) -> list[int]:
        """Identities of scratch at [start, start + len(tokens)) that consumed these drafts."""
        return self._run[request].beyond(start, tokens)

    def fed(self, request: str, group: int, interval: Interval, table: Sequence[int], *, rows: Interval) -> None:
        """Durable slots written from committed tokens, and from the taps of the target rows of this step."""
        if self.layout.footprint.taps and not rows.covers(interval):
            self._fail(
                "I8",
                f"a slot is fed from taps of a row that did not run (rows {rows})",
                request=request,
                group=group,
                position=interval.start,
            )
        ids = self.identities(request, group, interval)
        if len(ids) < interval.size:
            self._fail(
                "I8",
                "a slot is fed whose later token is not committed yet",
                request=request,
                group=group,
                position=interval.start + len(ids),
            )
        self.write(request, group, interval, table, "feed", ids=ids, durable=True)

    def became_durable(self, request: str, group: int, interval: Interval, table: Sequence[int], *, keep: bool) -> None:
        """Scratch whose tokens were accepted. With `keep` it must already carry the right identity."""
        size = self.layout.groups[group].page_tokens
        ids = self.identities(request, group, interval)
        for position, identity in zip(range(interval.start, interval.end), ids, strict=False):
            number, offset = divmod(position, size)
            if number >= len(table) or table[number] == SINK:
                continue
            shadow = self._page(group, table[number])
            if keep and shadow.ids[offset] != identity:
                continue
            shadow.ids[offset] = identity
            shadow.states[offset] = DURABLE

    def landed(
        self, request: str, group: int, page: int, offset: int, ids: Sequence[int], states: bytes, sender: str
    ) -> None:
        """A transfer writes into a page, in time or late."""
        assert self._manager is not None
        shadow = self._page(group, page)
        sequence = self._manager.sequences.get(request)
        own = sequence is not None and bool(sequence.loads) and page in sequence.groups[group].pages
        if not own and not shadow.quarantined:
            self._fail(
                "I1",
                "a transfer writes to a page that was given to somebody else",
                request=request,
                group=group,
                page=page,
                writer=shadow.writers[offset],
            )
        stop = offset + len(ids)
        shadow.group = group
        shadow.ids[offset:stop] = ids
        shadow.states[offset:stop] = states
        shadow.writers[offset:stop] = [Writer(sender, self.step, f"transfer for {request}")] * len(ids)

    def slots(self, group: int, page: int, offset: int, count: int) -> tuple[list[int], bytes]:
        """What the shadow knows of some slots, for a receiver elsewhere."""
        shadow = self._page(group, page)
        return shadow.ids[offset : offset + count], bytes(shadow.states[offset : offset + count])

    # ---- the ledger against the shadow -------------------------------------------------------------

    def committing(self, sequence: SequenceKV) -> None:
        """I4 and I8: what the ledger claims was written, from the committed tokens."""
        layout, hashes = self.layout, self._hashes(sequence)
        verified = self._verified.setdefault(sequence.id, [-1] * len(layout.groups))
        lows = self._lows.setdefault(sequence.id, [state.low for state in sequence.groups])
        for group in range(len(layout.groups) if sequence.drafting else layout.num_target):
            draft = group >= layout.num_target
            end = sequence.draft_end if draft else sequence.committed
            state, size, reach = sequence.groups[group], layout.groups[group].page_tokens, self._reach[group]
            if draft:
                self._check_draft_end(sequence, group, end, lows[group])
            start = (
                max(verified[group], state.low, state.first_page * size)
                if verified[group] >= 0
                else max(state.low, state.first_page * size)
            )
            for position in range(start, end):
                number, offset = divmod(position, size)
                page = state.pages[number] if number < len(state.pages) else SINK
                shadow = self._page(group, page)
                place = position + 1 + reach
                wanted = hashes[place] if place < len(hashes) else None
                if page == SINK or shadow.states[offset] != DURABLE or shadow.ids[offset] != wanted:
                    self._fail(
                        "I8" if draft else "I4",
                        "the ledger calls a slot durable that was not written from the committed tokens",
                        request=sequence.id,
                        group=group,
                        position=position,
                        page=page,
                        writer=shadow.writers[offset],
                    )
            verified[group] = end

    def _check_draft_end(self, sequence: SequenceKV, group: int, end: int, low: int) -> None:
        footprint, state = self.layout.footprint, sequence.groups[group]
        behind = footprint.durable_end(sequence.committed) - end
        if behind > 0 and not footprint.rebuild:
            self._fail(
                "I8",
                f"the draft group ends {behind} slot(s) short of where the step left it",
                request=sequence.id,
                group=group,
                position=end,
            )
        if state.low > low:
            self._fail("I8", "a draft group lost its beginning", request=sequence.id, group=group, position=state.low)

    def offered(self, sequence: SequenceKV, group: int, first_page: int, stop_page: int) -> None:
        """I9: a full durable page that a hit may need is in the index, as this page or as an equal one."""
        size, reach = self.layout.groups[group].page_tokens, self._reach[group]
        state, hashes = sequence.groups[group], self._hashes(sequence)
        for number in range(first_page, stop_page):
            place = (number + 1) * size + reach
            if not self._expected.retains(group, number) or place >= len(hashes):
                continue
            if hashes[place] not in self._available[group]:
                self._fail(
                    "I9",
                    "a full page that a hit needs was not kept",
                    request=sequence.id,
                    group=group,
                    position=number * size,
                    page=state.pages[number],
                )

    def check_conservation(self) -> None:
        """I5: every page is free, cached, held by somebody, pending, quarantined, or the sink."""
        manager = self._manager
        assert manager is not None
        for arena, counted in zip(manager.pool.arenas, manager.count_references(), strict=True):
            for page in range(1, arena.num_pages):
                shadow = self._pages[arena.index][page]
                if counted[page] != arena.refs[page] or arena.refs[page] != shadow.refs:
                    self._fail(
                        "I5",
                        f"a page has {arena.refs[page]} reference(s) but {counted[page]} holder(s)",
                        group=shadow.group,
                        page=page,
                        writer=shadow.writers[0],
                    )
            total = arena.num_free + arena.num_cached + arena.num_held + len(arena.quarantined) + 1
            if total != arena.num_pages or arena.has_duplicates():
                self._fail("I5", f"{total} pages are accounted for, the arena has {arena.num_pages}")
