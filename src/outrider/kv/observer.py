"""Where a checker can listen to the KV manager. The manager never depends on what a listener does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from outrider.kv.intervals import Interval

if TYPE_CHECKING:
    from outrider.kv.ledger import SequenceKV


class Hit(NamedTuple):
    """What an admission found. Draft intervals are [low, end) per draft group, in the order of groups."""

    end: int
    tap_rows: int
    draft: tuple[Interval, ...]


class KVObserver:
    """Does nothing; override what matters."""

    def admitting(self, sequence: SequenceKV, hit: Hit, *, use_cache: bool, may_draft: bool) -> None:
        """The search has decided, nothing is held yet."""

    def shared(self, sequence: SequenceKV, group: int, page_number: int, page: int, slots: int) -> None:
        """The sequence takes the first `slots` slots of a cached page, by reference or by copy."""

    def acquired(self, arena: int, pages: Sequence[int]) -> None: ...

    def retained(self, arena: int, pages: Sequence[int]) -> None: ...

    def source_held(self, arena: int, page: int) -> None:
        """Held only so that a coming copy can read it; its owner may go on writing past the copied slots."""

    def source_let_go(self, arena: int, page: int) -> None: ...

    def releasing(self, arena: int, pages: Sequence[int]) -> None: ...

    def deferred(self, arena: int, pages: Sequence[int], step: int) -> None:
        """Let go of, but a step in flight may still touch them."""

    def quarantined(self, arena: int, pages: Sequence[int]) -> None:
        """Held until now; a lost transfer may still write to them."""

    def restored(self, arena: int, pages: Sequence[int]) -> None: ...

    def evicted(self, arena: int, page: int) -> None: ...

    def committing(self, sequence: SequenceKV) -> None:
        """The ledger claims a new durable end; nothing is published or freed yet."""

    def published(self, sequence: SequenceKV, group: int, page_number: int, page: int, key: bytes) -> None: ...

    def already_published(self, sequence: SequenceKV, group: int, page_number: int, page: int) -> None:
        """The index holds an equal page under the key, so that this sequence's own stays private."""

    def admitted(self, sequence: SequenceKV) -> None:
        """Everything the search promised is held now."""

    def offered(self, sequence: SequenceKV, group: int, first_page: int, stop_page: int) -> None:
        """Full pages [first_page, stop_page) were offered to the index; those worth keeping are in it now."""

    def leaving(self, sequence: SequenceKV) -> None:
        """The sequence is about to let go; its end is kept first, where the policy asks for that."""

    def end_kept(self, sequence: SequenceKV) -> None:
        """What a hit at its end needs, as far as it holds it, is in the index now."""

    def forked(self, parent: SequenceKV, child: SequenceKV) -> None:
        """The child goes on from the parent's committed end."""

    def imported(self, sequence: SequenceKV, group: int, interval: Interval) -> None:
        """The manager was told that these slots have arrived."""

    def completed(self, step: int) -> None: ...

    def ended(self, sequence: SequenceKV) -> None:
        """The sequence holds nothing any more."""

    def cache_reset(self) -> None: ...

    def started_over(self) -> None:
        """A move was interrupted half-way: all pages are free again, except those set aside."""
