"""I5: references to pages, counted apart from the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.kv.intervals import page_count
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.ledger import SequenceKV
from outrider.kv.manager import KVManager
from outrider.kv.pages import NULL_PAGE
from outrider.sanitizer.kept import expected_margin
from outrider.sanitizer.report import Reporter
from outrider.sanitizer.shadow import PageShadow


class PageAccounts:
    """The shadow of every page of one worker, and its references."""

    def __init__(self, layout: KVLayout, config: KVConfig, reporter: Reporter) -> None:
        self._layout = layout
        self._keep_margin = config.keep_margin
        every = config.retention.every
        self._aligned_ends = config.prefix_caching and (every is None or every > layout.alignment)
        """Whether a sequence holds behind its windows what its end would need if it were released now."""
        self._fail = reporter.fail
        slots = [1] * len(config.arena_pages)
        for group, spec in enumerate(layout.groups):
            arena = layout.arena_of[group]
            slots[arena] = max(slots[arena], spec.page_tokens)
        self._slots = slots
        self.pages = [
            [PageShadow(slots[arena]) for _ in range(count)] for arena, count in enumerate(config.arena_pages)
        ]

    def page(self, group: int, page: int) -> PageShadow:
        return self.pages[self._layout.arena_of[group]][page]

    def _blame(self, what: str, shadow: PageShadow, page: int) -> None:
        """Report a page by its last writer, since releases do not name a sequence."""
        writer = shadow.writers[0]
        self._fail("I5", what, request=writer.request or "-", group=shadow.group, page=page, writer=writer)

    def acquired(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            shadow = self.pages[arena][page]
            if page == NULL_PAGE or shadow.refs or shadow.quarantined:
                self._blame("a page was handed out that is not free", shadow, page)
            shadow.refs = 1
            shadow.clear(self._slots[arena])

    def retained(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            self.pages[arena][page].refs += 1

    def source_held(self, arena: int, page: int) -> None:
        self.pages[arena][page].sources += 1

    def source_let_go(self, arena: int, page: int) -> None:
        self.pages[arena][page].sources -= 1

    def deferred(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            shadow = self.pages[arena][page]
            shadow.pending += 1
            if shadow.pending > shadow.refs:
                self._blame("a page was released more often than it was held", shadow, page)

    def releasing(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            shadow = self.pages[arena][page]
            shadow.pending -= shadow.pending > 0
            shadow.refs -= 1
            if shadow.refs < 0:
                self._blame("a page was released more often than it was held", shadow, page)

    def quarantined(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            shadow = self.pages[arena][page]
            if shadow.refs != 1:
                self._blame("a quarantined page is held by another sequence", shadow, page)
            shadow.refs, shadow.quarantined = 0, True

    def restored(self, arena: int, pages: Sequence[int]) -> None:
        for page in pages:
            shadow = self.pages[arena][page]
            shadow.quarantined, shadow.refs = False, 1

    def start_over(self, pinned: Mapping[tuple[int, int], int]) -> None:
        for arena, shadows in enumerate(self.pages):
            for page, shadow in enumerate(shadows):
                shadows[page] = PageShadow(self._slots[arena])
                shadows[page].quarantined = shadow.quarantined
                pins = pinned.get((arena, page), 0)
                if pins:
                    # A tier still copies what the page held; what it holds later is another page's matter.
                    shadows[page].refs = shadows[page].sources = pins
                    shadows[page].ids, shadows[page].states = shadow.ids, shadow.states

    def check_surplus(self, sequence: SequenceKV, *, k: int, rows_ahead: int, steps_ahead: int) -> None:
        """I5: after a commit a sequence keeps no page past what the steps to come may ask for.

        reserved   [0 ------ v)[ rows ahead )[ 1 + k rows a step )[ scratch, draft groups only )
        """
        layout = self._layout
        if not sequence.drafting and layout.footprint.groups:
            k = 0
        end = sequence.committed + rows_ahead + steps_ahead * (1 + k)
        scratch = layout.footprint.scratch_ahead(k) + layout.footprint.durable_lead
        for group, state in enumerate(sequence.groups):
            most = page_count(end + (scratch if group >= layout.num_target else 0), layout.groups[group].page_tokens)
            self._check_front(sequence, group)
            if len(state.pages) > max(most, state.first_page):
                what = f"{len(state.pages)} page(s) are reserved where {most} are enough for the next step"
                at, page = sequence.committed, state.pages[-1]
                self._fail("I5", what, request=sequence.id, group=group, position=at, page=page)

    def _check_front(self, sequence: SequenceKV, group: int) -> None:
        """I5: nothing is held that no row to come reads, and that keeping the end does not ask for.

        committed, less the reach   [ first key ------- v)         the last boundary  [ first key, less the margin - b)
        """
        layout, state, spec = self._layout, sequence.groups[group], self._layout.groups[group]
        draft = group >= layout.num_target
        if draft and not sequence.drafting:
            return
        end = min(sequence.committed, sequence.draft_end) if draft else sequence.committed
        first = spec.kind.first_key(max(0, end - max(layout.footprint.token_reach, self._keep_margin)))
        if self._aligned_ends:
            boundary = end // layout.alignment * layout.alignment
            first = min(first, spec.kind.first_key(max(0, boundary - expected_margin(layout, group))))
        if state.first_page < min(first // spec.page_tokens, len(state.pages)):
            what = f"a page behind the window is held, though nothing below position {first} is needed"
            at, page = state.first_page * spec.page_tokens, state.pages[state.first_page]
            self._fail("I5", what, request=sequence.id, group=group, position=at, page=page)

    def check(self, manager: KVManager) -> None:
        """I5: every page is free, cached, held, pending, quarantined, or the null page."""
        for arena, counted in zip(manager.pool.arenas, manager.count_references(), strict=True):
            for page in range(1, arena.num_pages):
                shadow = self.pages[arena.index][page]
                if counted[page] != arena.refs[page] or arena.refs[page] != shadow.refs:
                    self._blame(
                        f"a page has {arena.refs[page]} reference(s) but {counted[page]} holder(s)", shadow, page
                    )
            total = arena.num_free + arena.num_cached + arena.num_held + len(arena.quarantined) + 1
            if total != arena.num_pages or arena.has_duplicates():
                self._fail("I5", f"{total} pages are accounted for, the arena has {arena.num_pages}")
