"""The invariants I1 to I6, I8 and I9, checked on block tables and intervals (level `plan`).

Two streams come in. The KV manager reports what it decides (the KVObserver methods below): pages taken,
shared, published, let go. The runner reports what a step does according to its plan (StepChecks). The
ledger's claims are compared with the shadow at every commit. I7, equal tokens, is the oracle's to check.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from outrider.errors import InvariantViolation
from outrider.kv.intervals import Interval
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.ledger import SequenceKV
from outrider.kv.manager import KVManager
from outrider.kv.observer import Hit, KVObserver
from outrider.kv.pages import NULL_PAGE
from outrider.kv.prefix import Media
from outrider.kv.retention import TAIL
from outrider.sanitizer.accounts import PageAccounts
from outrider.sanitizer.checksums import Checksums
from outrider.sanitizer.expected import ExpectedHits
from outrider.sanitizer.kept import ExpectedKept
from outrider.sanitizer.report import Mode, Reporter
from outrider.sanitizer.shadow import DURABLE, PageShadow, TokenHashes, namespace_seed, shows_media
from outrider.sanitizer.steps import StepChecks


class Sanitizer(KVObserver):
    def __init__(self, layout: KVLayout, config: KVConfig, *, mode: Mode = Mode.RAISE) -> None:
        self.layout = layout
        self.config = config
        self.tier_holds: Callable[[SequenceKV, int, int], bool] = lambda sequence, group, identity: False
        """Whether a sequence may load the page of a group whose last slot has this identity from another tier."""
        self._searching: SequenceKV | None = None
        """The sequence whose hit is searched."""
        self.checksums: Checksums | None = None
        """Checksums of published pages, for level `bytes`; a runner with real memory sets them."""
        self._reporter = Reporter(layout, mode)
        self._fail = self._reporter.fail
        self._accounts = PageAccounts(layout, config, self._reporter)
        self._page = self._accounts.page
        self.steps = StepChecks(layout, config, self._accounts, self._reporter)
        self._manager: KVManager | None = None
        self._available: list[dict[int, int]] = [{} for _ in layout.groups]
        """Number of published device pages that hold a slot, by its identity, per group."""
        self._divisible: list[dict[int, int]] = [{} for _ in layout.groups]
        """Number of those pages of which a part may be taken, since they show no media."""
        self._expected = ExpectedHits(layout, self._available, self._divisible, self._tier_holds)
        self._kept = ExpectedKept(layout, config.retention)
        self._end = ExpectedKept(layout, TAIL)
        self._ends: dict[str, tuple[int, ...]] = {}
        """Ends that are kept whatever the interval of the policy is, per sequence."""
        self._planned: dict[str, TokenHashes] = {}
        self._verified: dict[str, list[int]] = {}
        """The ledger's durable end that was last compared with the shadow, per sequence and group."""
        self._lows: dict[str, list[int]] = {}
        self._checked_pages: dict[str, list[int]] = {}
        """The first page that was not looked for in the index yet, per sequence and group; -1 before the first look."""
        self._hits: dict[str, tuple[Hit, Hit]] = {}
        """The hit that was found and the one that should have been, between search and admission."""
        # Not the layout's own list of reaches: the keys that are checked here are made from that one.
        drafts = len(layout.groups) - layout.num_target
        self._reach = [0] * layout.num_target + [layout.footprint.token_reach] * drafts

    @property
    def violations(self) -> list[InvariantViolation]:
        return self._reporter.violations

    def bind(self, manager: KVManager) -> None:
        """Set the manager whose ledger is compared with the shadow."""
        self._manager = manager
        self.steps.bind(manager)

    def track(self, sequence: str, tokens: array[int], namespace: tuple[str, str], media: Sequence[Media] = ()) -> None:
        """Note the runner's own tokens and media of a sequence: what it feeds the model, ahead of the ledger."""
        self.steps.track(sequence, tokens, self._seed(namespace), media)

    def forget(self, sequence: str) -> None:
        """Forget a sequence of which no step is in flight."""
        self._planned.pop(sequence, None)
        self.steps.forget(sequence)

    def check_conservation(self) -> None:
        """I5: every page is free, cached, held, pending, quarantined, or the null page."""
        assert self._manager is not None
        self._accounts.check(self._manager)

    def check_surplus(self, sequence: SequenceKV, *, k: int, rows_ahead: int) -> None:
        """I5: a commit released what the steps to come will not ask for. rows_ahead: rows already planned."""
        self._accounts.check_surplus(sequence, k=k, rows_ahead=rows_ahead, steps_ahead=self.config.steps_ahead)

    def _seed(self, namespace: tuple[str, str]) -> int:
        identity = self.config.identity
        return namespace_seed(identity.weights, identity.dtype, identity.layout, *namespace)

    def _hashes(self, sequence: SequenceKV) -> list[int]:
        known = self._planned.get(sequence.id)
        if known is None:
            seed = self._seed(sequence.namespace)
            known = self._planned[sequence.id] = TokenHashes(seed, sequence.tokens, sequence.chain.media)
        return known.extend()

    # ---- pages -------------------------------------------------------------------------------------

    def acquired(self, arena: int, pages: Sequence[int]) -> None:
        self._accounts.acquired(arena, pages)

    def retained(self, arena: int, pages: Sequence[int]) -> None:
        self._accounts.retained(arena, pages)

    def source_held(self, arena: int, page: int) -> None:
        self._accounts.source_held(arena, page)

    def source_let_go(self, arena: int, page: int) -> None:
        self._accounts.source_let_go(arena, page)

    def deferred(self, arena: int, pages: Sequence[int], step: int) -> None:
        self._accounts.deferred(arena, pages)

    def releasing(self, arena: int, pages: Sequence[int]) -> None:
        self._accounts.releasing(arena, pages)

    def quarantined(self, arena: int, pages: Sequence[int]) -> None:
        self._accounts.quarantined(arena, pages)

    def restored(self, arena: int, pages: Sequence[int]) -> None:
        self._accounts.restored(arena, pages)

    def evicted(self, arena: int, page: int) -> None:
        shadow = self._accounts.pages[arena][page]
        if shadow.refs:
            self._fail("I5", "a page in use was evicted", page=page, writer=shadow.writers[0])
        self._unpublish(shadow, page)

    def _unpublish(self, shadow: PageShadow, page: int) -> None:
        if not shadow.published:
            return
        shadow.published = False
        if self.checksums is not None:
            self._check_bytes(shadow.group, page)
            self.checksums.forget(shadow.group, page)
        for table in self._tables(shadow):
            for identity in shadow.ids[: self.layout.groups[shadow.group].page_tokens]:
                table[identity] -= 1
                if not table[identity]:
                    del table[identity]

    def _tables(self, shadow: PageShadow) -> list[dict[int, int]]:
        """Returns the tables in which the slots of a published page are counted."""
        available = self._available[shadow.group]
        return [available] if shadow.shows_media else [available, self._divisible[shadow.group]]

    def cache_reset(self) -> None:
        for arena in self._accounts.pages:
            for page, shadow in enumerate(arena):
                self._unpublish(shadow, page)
        assert self._manager is not None
        for sequence in self._manager.sequences.values():
            # Pages that were published, or that a hit brought, are not published again.
            checked = self._checked_pages.setdefault(sequence.id, [-1] * len(sequence.groups))
            for group, state in enumerate(sequence.groups):
                complete = self._durable_end(sequence, group) // self.layout.groups[group].page_tokens
                checked[group] = max(checked[group], len(state.pages) if sequence.loads else complete)

    def started_over(self) -> None:
        assert self._manager is not None
        self._accounts.start_over(self._manager.pool.pins)
        for table in (
            *self._available,
            *self._divisible,
            self._verified,
            self._lows,
            self._hits,
            self._ends,
            self._checked_pages,
        ):
            table.clear()  # type: ignore[attr-defined]
        if self.checksums is not None:
            self.checksums.clear()

    def forked(self, parent: SequenceKV, child: SequenceKV) -> None:
        self._ends[child.id] = self._ends.get(parent.id, ())
        # The parent's own page may be private, since the index held an equal one that is evicted by now.
        checked = self._checked_pages.get(parent.id, [-1] * len(parent.groups))
        shared = [parent.committed - reach for reach in self._reach]
        self._checked_pages[child.id] = [
            min(known, end // spec.page_tokens)
            for known, end, spec in zip(checked, shared, self.layout.groups, strict=True)
        ]

    def leaving(self, sequence: SequenceKV) -> None:
        self._ends[sequence.id] = (*self._ends.get(sequence.id, ()), sequence.committed)

    def end_kept(self, sequence: SequenceKV) -> None:
        """I9: a hit at the end of the sequence finds every page that the sequence held for it."""
        layout, ends = self.layout, (sequence.committed,)
        for group in range(len(layout.groups) if sequence.drafting else layout.num_target):
            size, draft = layout.groups[group].page_tokens, group >= layout.num_target
            state, end = sequence.groups[group], sequence.draft_end if draft else sequence.committed
            if self._kept.keeps_whole(group):
                continue  # its pages were looked for as they became complete
            if not draft or layout.footprint.publishes_above(state.low):
                numbers = range(-(-state.low // size), min(state.published, end // size))
                self._check_kept(sequence, group, [n for n in numbers if self._end.must_keep(group, n, ends)])

    def ended(self, sequence: SequenceKV) -> None:
        self._ends.pop(sequence.id, None)
        self._verified.pop(sequence.id, None)
        self._checked_pages.pop(sequence.id, None)
        self._lows.pop(sequence.id, None)

    # ---- hits and publication ----------------------------------------------------------------------

    def admitting(self, sequence: SequenceKV, hit: Hit, *, use_cache: bool, may_draft: bool) -> None:
        """I9: the hit equals a slot-by-slot search over what is published."""
        self._searching = sequence
        limit = len(sequence.tokens) - 1 if use_cache else 0
        expected = self._expected.search(
            self._hashes(sequence), limit, draft=may_draft, tiers=not sequence.skip_tiers, media=sequence.chain.media
        )
        self._hits[sequence.id] = (hit, expected)
        if self._kept.asks_for_ends:
            shared = self._expected.shared_end(
                self._hashes(sequence), limit, tiers=not sequence.skip_tiers, media=sequence.chain.media
            )
            self._ends[sequence.id] = (len(sequence.tokens), shared)

    def _tier_holds(self, group: int, identity: int) -> bool:
        assert self._searching is not None
        return self.tier_holds(self._searching, group, identity)

    def admitted(self, sequence: SequenceKV) -> None:
        """I9: compare the hits last, so that a page with wrong content is reported as such."""
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
        self._check_bytes(
            group, page, request=sequence.id, position=page_number * self.layout.groups[group].page_tokens
        )
        shadow, size = self._page(group, page), self.layout.groups[group].page_tokens
        start = page_number * size
        first = start + 1 + self._reach[group]
        if shadow.ids[:slots] == self._hashes(sequence)[first : first + slots] and shadow.published:
            return
        pairs = zip(shadow.ids[:slots], self._hashes(sequence)[first : first + slots], strict=False)
        wrong = next((place for place, (one, other) in enumerate(pairs) if one != other), slots - 1)
        what = "a hit names a page whose content is not what its key says"
        self._fail_slot("I2", what, sequence.id, group, start + wrong, page)

    def _fail_slot(self, invariant: str, what: str, request: str, group: int, position: int, page: int) -> None:
        """Report a slot of a page, with its last writer."""
        writer = self._page(group, page).writers[position % self.layout.groups[group].page_tokens]
        self._fail(invariant, what, request=request, group=group, position=position, page=page, writer=writer)

    def _check_bytes(self, group: int, page: int, *, request: str = "-", position: int = -1) -> None:
        """I2 at level `bytes`: the page was not written to since it was published, whatever the plans said."""
        if self.checksums is not None and not self.checksums.holds(group, page):
            what, writer = "the bytes of a published page have changed", self._page(group, page).writers[0]
            self._fail("I2", what, request=request, group=group, position=position, page=page, writer=writer)

    def published(self, sequence: SequenceKV, group: int, page_number: int, page: int, key: bytes) -> None:
        """I2: only durable slots, of this very sequence, enter the index."""
        shadow, size = self._page(group, page), self.layout.groups[group].page_tokens
        hashes = self._hashes(sequence)
        for offset in range(size):
            position = page_number * size + offset
            place = position + 1 + self._reach[group]
            wanted = hashes[place] if place < len(hashes) else None
            if page == NULL_PAGE or shadow.states[offset] != DURABLE or shadow.ids[offset] != wanted:
                what = "a published page holds a slot that is not durable for its sequence"
                self._fail_slot("I2", what, sequence.id, group, position, page)
        reach, media = self._reach[group], sequence.chain.media
        end = (page_number + 1) * size
        later = sequence.tokens[end : end + reach].tobytes()
        shown = b"".join(item.digest for item in media if item.start < end + reach and end < item.end)
        if reach and not (later in key and key.endswith(shown or later)):
            what = "the key does not name the later tokens that the page depends on"
            self._fail_slot("I2", what, sequence.id, group, end - 1, page)
        if not self._kept.may_keep(group, page_number, self._ends.get(sequence.id, ())):
            self._fail_slot("I9", "a page was kept that no hit can need", sequence.id, group, page_number * size, page)
        shadow.published = True
        if self.checksums is not None:
            self.checksums.seal(group, page)
        shadow.group = group
        shadow.shows_media = shows_media(media, page_number * size, end + reach)
        for table in self._tables(shadow):
            for identity in shadow.ids[:size]:
                table[identity] = table.get(identity, 0) + 1

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
                what = "a slot is taken over from a transfer that did not bring it"
                self._fail_slot("I6", what, sequence.id, group, position, page)

    def page_stored(self, group: int, page: int) -> None:
        """I5, and I2 at level `bytes`: a page that a tier has copied was held meanwhile, and not written to."""
        shadow = self._page(group, page)
        if not shadow.sources:
            self._fail("I5", "a tier copied a page that was not held for it", group=group, page=page)
        self._check_bytes(group, page)

    def page_identity(self, sequence: SequenceKV, group: int, page_number: int) -> int | None:
        """Returns the identity of the last slot of a page of the sequence; None if its tokens are not all known."""
        place = (page_number + 1) * self.layout.groups[group].page_tokens + self._reach[group]
        hashes = self._hashes(sequence)
        return hashes[place] if place < len(hashes) else None

    def transfer_differs(self, request: str, group: int, interval: Interval, sender: str) -> None:
        """I6 at level `bytes`: the slots that arrived are not those that their sender holds."""
        what = f"the bytes of {interval} that arrived differ from those of their sender {sender}"
        self._fail("I6", what, request=request, group=group, position=interval.start)

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
            start = max(verified[group], state.held_from(size))
            for position in range(start, end):
                number, offset = divmod(position, size)
                page = state.pages[number] if number < len(state.pages) else NULL_PAGE
                shadow = self._page(group, page)
                place = position + 1 + reach
                wanted = hashes[place] if place < len(hashes) else None
                if page == NULL_PAGE or shadow.states[offset] != DURABLE or shadow.ids[offset] != wanted:
                    what = "the ledger calls a slot durable that was not written from the committed tokens"
                    self._fail_slot("I8" if draft else "I4", what, sequence.id, group, position, page)
            verified[group] = end

    def _check_draft_end(self, sequence: SequenceKV, group: int, end: int, low: int) -> None:
        footprint, state = self.layout.footprint, sequence.groups[group]
        behind = footprint.durable_end(sequence.committed) - end
        if behind > 0 and not footprint.rebuild:
            what = f"the draft group ends {behind} slot(s) short of where the step left it"
            self._fail("I8", what, request=sequence.id, group=group, position=end)
        if state.low > low:
            self._fail("I8", "a draft group lost its beginning", request=sequence.id, group=group, position=state.low)

    def committed(self, sequence: SequenceKV) -> None:
        """I9: a full, durable page that a hit may need is in the index, as this page or as an equal one."""
        layout, ends = self.layout, self._ends.get(sequence.id, ())
        checked = self._checked_pages.setdefault(sequence.id, [-1] * len(layout.groups))
        groups = range(len(layout.groups) if sequence.drafting else layout.num_target)
        for group in groups if self.config.prefix_caching else ():
            state, size = sequence.groups[group], layout.groups[group].page_tokens
            if group >= layout.num_target and not layout.footprint.publishes_above(state.low):
                continue
            stop = self._durable_end(sequence, group) // size
            first = checked[group] if checked[group] >= 0 else state.first_page
            numbers = range(max(first, -(-state.low // size)), stop)
            self._check_kept(sequence, group, [n for n in numbers if self._kept.must_keep(group, n, ends)])
            checked[group] = max(first, stop)

    def _durable_end(self, sequence: SequenceKV, group: int) -> int:
        return sequence.committed if group < self.layout.num_target else sequence.draft_end

    def _check_kept(self, sequence: SequenceKV, group: int, numbers: Sequence[int]) -> None:
        size, reach = self.layout.groups[group].page_tokens, self._reach[group]
        state, hashes = sequence.groups[group], self._hashes(sequence)
        for number in numbers:
            place = (number + 1) * size + reach
            if place < len(hashes) and hashes[place] not in self._available[group]:
                what = "a full page that a hit may need is not in the index"
                self._fail_slot("I9", what, sequence.id, group, number * size, state.pages[number])
