"""What follows a commit: publish pages that are complete, free pages that left their window, keep the end.

pages        [ freed )[ held behind the window )[ window ... committed )[ reserved )[ surplus )
                      ^ held_from: needed by rows to come, or for the end      ^ given back by trim
"""

from __future__ import annotations

from outrider.kv.holdings import NEVER, Holdings
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.ledger import SequenceKV
from outrider.kv.observer import KVObserver
from outrider.kv.publication import GroupPublisher, NewPage
from outrider.kv.retention import RetentionMask


class Progress:
    def __init__(
        self,
        layout: KVLayout,
        config: KVConfig,
        mask: RetentionMask,
        holdings: Holdings,
        observer: KVObserver | None,
        *,
        notes_new_pages: bool = False,
    ) -> None:
        """`notes_new_pages`: whether there are tiers behind the device, which take pages over."""
        self.layout = layout
        self.mask = mask
        self.holdings = holdings
        self._caching = config.prefix_caching
        self._keep_margin = config.keep_margin
        self._footprint = layout.footprint
        self._observer = observer
        self._publishers = [GroupPublisher(g, layout, mask, holdings.pool, observer) for g in range(len(layout.groups))]
        self._new_pages: list[NewPage] = []
        for publisher in self._publishers if notes_new_pages else ():
            publisher.new_pages = self._new_pages
        self._slides = any(spec.kind.slides for spec in layout.groups)
        """Whether some group frees pages before its sequence ends."""

    def take_new_pages(self) -> list[NewPage]:
        """Returns the pages that entered the index since the last call; they may have left it again."""
        taken = self._new_pages[:]
        self._new_pages.clear()
        return taken

    def durable_end(self, sequence: SequenceKV, group: int) -> int:
        return sequence.committed if group < self.layout.num_target else sequence.draft_end

    def advance(self, sequence: SequenceKV, *, margin: int) -> None:
        """Publish and free pages after a page was completed or left its window.

        margin: number of positions before the end that tap rows will query.
        """
        self.publish(sequence)
        if self._slides:
            self.free_behind(sequence, max(margin, self._keep_margin))
        self.find_next_event(sequence)

    def publish(self, sequence: SequenceKV) -> None:
        """Enter every page into the index that is full, durable, and worth keeping."""
        if not self._caching:
            return
        num_target = self.layout.num_target
        for g, size in self.holdings.groups(sequence):
            state = sequence.groups[g]
            stop = (sequence.committed if g < num_target else sequence.draft_end) // size
            if stop <= state.published:
                continue
            first, state.published = max(state.published, state.first_page), stop
            if first < stop and (g < num_target or self._footprint.publishes_above(state.low)):
                self._publishers[g].publish(sequence, first, stop)

    def publish_end(self, sequence: SequenceKV) -> None:
        """Publish what a hit at the end of the sequence, which is about to be released, needs.

        Pages past the prompt were held back until now; free_behind has left those that are asked for here.
        """
        mask, holdings, num_target = self.mask, self.holdings, self.layout.num_target
        if not (self._caching and mask.keeps_ends) or sequence.loads or holdings.copies_outstanding(sequence):
            return
        sequence.marks = mask.marks(*sequence.marks, sequence.committed)
        if self._observer:
            self._observer.leaving(sequence)
        for g, size in holdings.groups(sequence):
            state = sequence.groups[g]
            slides = self.layout.groups[g].kind.slides
            if not slides or not (g < num_target or self._footprint.publishes_above(state.low)):
                continue
            first = max(state.first_page, -(-state.low // size))
            stop = min(state.published, self.durable_end(sequence, g) // size)
            if first < stop:
                self._publishers[g].publish_marked(sequence, first, stop)
        if self._observer:
            self._observer.end_kept(sequence)

    def free_behind(self, sequence: SequenceKV, margin: int) -> None:
        """Release pages that neither a query at or after the committed end, less the margin, nor the end needs."""
        for g, size in self.holdings.groups(sequence):
            end = min(sequence.committed, self.durable_end(sequence, g))
            self.holdings.free_front(g, sequence.groups[g], self.mask.held_from(g, end, margin) // size)

    def find_next_event(self, sequence: SequenceKV) -> None:
        """Work out the first committed end at which a page completes or leaves a window."""
        event, lead = NEVER, self._footprint.durable_lead
        for g, size in self.holdings.groups(sequence):
            state = sequence.groups[g]
            if self._caching:
                event = min(event, (state.published + 1) * size - (lead if g >= self.layout.num_target else 0))
            if self._slides:
                freed_at = self.mask.freed_at(g, (state.first_page + 1) * size, self._keep_margin)
                event = event if freed_at is None else min(event, freed_at)
        sequence.next_event = event

    def trim(self, sequence: SequenceKV, v: int) -> None:
        """Release pages past what the next step of the same shape will ask for."""
        for g, size in self.holdings.target:
            self.holdings.cut(sequence, g, size, v + sequence.target_headroom)
        for g, size in self.holdings.draft if sequence.drafting else ():
            self.holdings.cut(sequence, g, size, v + sequence.draft_headroom)
        self.holdings.measure_room(sequence)
