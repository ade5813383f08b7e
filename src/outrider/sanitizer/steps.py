"""Checks of what a step does according to its plan (I1, I3, I6, I8): copies, reads, writes, feeding, slots that
arrive.

The runner reports it here, through its own block tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.kv.intervals import Interval
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.manager import KVManager
from outrider.kv.pages import NULL_PAGE
from outrider.kv.plan import PageCopy
from outrider.kv.prefix import Media
from outrider.sanitizer.accounts import PageAccounts
from outrider.sanitizer.report import Reporter
from outrider.sanitizer.shadow import DURABLE, SCRATCH, TokenHashes, Writer


class StepChecks:
    def __init__(self, layout: KVLayout, config: KVConfig, accounts: PageAccounts, reporter: Reporter) -> None:
        self.layout = layout
        self.config = config
        self._page = accounts.page
        self._reporter = reporter
        self._fail = reporter.fail
        self._manager: KVManager | None = None
        self._run: dict[str, TokenHashes] = {}
        drafts = len(layout.groups) - layout.num_target
        self._reach = [0] * layout.num_target + [layout.footprint.token_reach] * drafts

    def bind(self, manager: KVManager) -> None:
        self._manager = manager

    def begin(self, step: int) -> None:
        """Note that everything reported from now on belongs to this step."""
        self._reporter.step = step

    def track(self, sequence: str, tokens: array[int], seed: int, media: Sequence[Media]) -> None:
        """Note the runner's own tokens of a sequence: what it feeds the model, ahead of the ledger."""
        self._run[sequence] = TokenHashes(seed, tokens, media)

    def forget(self, sequence: str) -> None:
        self._run.pop(sequence, None)

    def copied(self, copy: PageCopy) -> None:
        """Check and apply a page copy, which runs before the step's rows."""
        source, target = self._page(copy.group, copy.source), self._page(copy.group, copy.destination)
        for offset in range(copy.first, copy.stop):
            if source.states[offset] != DURABLE:
                wrong, writer = "a copy reads a slot that is not durable", source.writers[offset]
                self._fail("I3", wrong, group=copy.group, page=copy.source, writer=writer)
        what = None
        if target.published or target.refs - target.pending > 1 or copy.destination == NULL_PAGE:
            what = "a copy writes to a published or shared page"
        elif not target.refs and not target.quarantined:
            what = "a copy writes to a page that is not held any more"
        if what is not None:
            self._fail("I1", what, group=copy.group, page=copy.destination, writer=target.writers[0])
        target.group = copy.group
        span = slice(copy.first, copy.stop)
        target.ids[span] = source.ids[span]
        target.states[span] = source.states[span]
        writer = Writer("-", self._reporter.step, f"copy of page {copy.source}")
        target.writers[span] = [writer] * (copy.stop - copy.first)

    def read(self, request: str, group: int, interval: Interval, table: Sequence[int], *, scratch_from: int) -> None:
        """I3: a read finds durable slots of this identity below scratch_from, then own scratch of this step."""
        size, reach = self.layout.groups[group].page_tokens, self._reach[group]
        upto = self._run[request].extend()
        position = interval.start
        while position < interval.end:
            number, offset = divmod(position, size)
            stop = min(size, offset + interval.end - position)
            page = table[number] if number < len(table) else NULL_PAGE
            if page == NULL_PAGE:
                what = "a read of the null page: the slot is not held"
                self._fail("I3", what, request=request, group=group, position=position, page=page)
                return
            shadow = self._page(group, page)
            durable = min(stop, max(offset, offset + scratch_from - position))
            count, first = durable - offset, position + 1 + reach
            if (
                shadow.ids[offset:durable] != upto[first : first + count]
                or shadow.states.count(DURABLE, offset, durable) != count
                or any((w.request, w.step) != (request, self._reporter.step) for w in shadow.writers[durable:stop])
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
                wrong = (writer.request, writer.step) != (request, self._reporter.step)
                what = "a read of scratch that this request did not write in this step"
            else:
                wrong = state != DURABLE or shadow.ids[place] != expected or shadow.refs == 0
                what = (
                    "a read of a slot that is not held"
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
        """I1: a write lies inside the writer's reservation, below the limit, and not in a published or shared page."""
        size, limit = self.layout.groups[group].page_tokens, self._limit(group)
        writer = Writer(request, self._reporter.step, what)
        position = interval.start
        while position < interval.end:
            number, offset = divmod(position, size)
            stop = min(size, offset + interval.end - position)
            page = table[number] if number < len(table) else NULL_PAGE
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
        elif page == NULL_PAGE or not (reserved or (state is None and shadow.pending)):
            # A request that ended while its step was in flight writes to pages that wait for that step.
            what = "a write outside the writer's reservation"
        elif shadow.published:
            what = "a write to a published page"
        elif shadow.refs - shadow.pending - shadow.sources > 1:
            what = "a write to a page that another sequence holds too"
        if what is not None:
            writer = shadow.writers[position % self.layout.groups[group].page_tokens]
            self._fail("I1", what, request=request, group=group, position=position, page=page, writer=writer)

    def identities(self, request: str, group: int, interval: Interval) -> list[int]:
        """Returns the identities of positions whose tokens the runner knows, fewer if it does not know them all."""
        first = interval.start + 1 + self._reach[group]
        return self._run[request].extend()[first : first + interval.size]

    def draft_identities(self, request: str, start: int, tokens: Sequence[int]) -> list[int]:
        """Returns the identities of scratch at [start, start + len(tokens)) that consumed these drafts."""
        return self._run[request].beyond(start, tokens)

    def fed(self, request: str, group: int, interval: Interval, table: Sequence[int], *, rows: Interval) -> None:
        """I8: slots are fed from committed tokens, and from taps of target rows of this step."""
        if self.layout.footprint.taps and not rows.covers(interval):
            what = f"a slot is fed from taps of a row that did not run (rows {rows})"
            self._fail("I8", what, request=request, group=group, position=interval.start)
        ids = self.identities(request, group, interval)
        if len(ids) < interval.size:
            what = "a slot is fed whose later token is not committed yet"
            self._fail("I8", what, request=request, group=group, position=interval.start + len(ids))
        self.write(request, group, interval, table, "feed", ids=ids, durable=True)

    def became_durable(self, request: str, group: int, interval: Interval, table: Sequence[int], *, keep: bool) -> None:
        """Make scratch durable whose tokens were accepted. With `keep` it must already carry the right identity."""
        size = self.layout.groups[group].page_tokens
        ids = self.identities(request, group, interval)
        for position, identity in zip(range(interval.start, interval.end), ids, strict=False):
            number, offset = divmod(position, size)
            if number >= len(table) or table[number] == NULL_PAGE:
                continue
            shadow = self._page(group, table[number])
            if keep and shadow.ids[offset] != identity:
                continue
            shadow.ids[offset] = identity
            shadow.states[offset] = DURABLE

    def landed(
        self, request: str, group: int, page: int, offset: int, ids: Sequence[int], states: bytes, sender: str
    ) -> None:
        """I1: a transfer, in time or late, writes to pages of its request or to quarantined ones."""
        assert self._manager is not None
        shadow = self._page(group, page)
        sequence = self._manager.sequences.get(request)
        own = sequence is not None and bool(sequence.loads) and page in sequence.groups[group].pages
        if not own and not shadow.quarantined:
            what, writer = "a transfer writes to a page that was given to another sequence", shadow.writers[offset]
            self._fail("I1", what, request=request, group=group, page=page, writer=writer)
        stop = offset + len(ids)
        shadow.group = group
        shadow.ids[offset:stop] = ids
        shadow.states[offset:stop] = states
        shadow.writers[offset:stop] = [Writer(sender, self._reporter.step, f"transfer for {request}")] * len(ids)

    def slots(self, group: int, page: int, offset: int, count: int) -> tuple[list[int], bytes]:
        """Returns the identities and states of some slots, for a receiving worker."""
        shadow = self._page(group, page)
        return shadow.ids[offset : offset + count], bytes(shadow.states[offset : offset + count])
