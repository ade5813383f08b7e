"""Where a checker can listen to the KV manager. The manager never depends on what a listener does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.kv.intervals import Interval

if TYPE_CHECKING:
    from outrider.kv.ledger import SequenceKV


class Hit(NamedTuple):
    """What the hit search found. Draft intervals are [low, end) per draft group, in the order of groups."""

    end: int
    tap_rows: int
    draft: tuple[Interval, ...]


class KVObserver:
    """An observer that ignores every event; a checker overrides the methods that it needs."""

    def admitting(self, sequence: SequenceKV, hit: Hit, *, use_cache: bool, may_draft: bool) -> None:
        """The hit search is done, and nothing is held yet."""

    def shared(self, sequence: SequenceKV, group: int, page_number: int, page: int, slots: int) -> None:
        """The sequence takes the first `slots` slots of a cached page, by reference or by copy."""

    def acquired(self, arena: int, pages: Sequence[int]) -> None: ...

    def retained(self, arena: int, pages: Sequence[int]) -> None: ...

    def source_held(self, arena: int, page: int) -> None:
        """The page is held only for a coming copy to read; its owner may go on writing past the copied slots."""

    def source_let_go(self, arena: int, page: int) -> None: ...

    def releasing(self, arena: int, pages: Sequence[int]) -> None: ...

    def deferred(self, arena: int, pages: Sequence[int], step: int) -> None:
        """The pages were released, but a step in flight may still touch them."""

    def quarantined(self, arena: int, pages: Sequence[int]) -> None:
        """The pages are put aside, since a lost transfer may still write to them."""

    def restored(self, arena: int, pages: Sequence[int]) -> None: ...

    def evicted(self, arena: int, page: int) -> None: ...

    def committing(self, sequence: SequenceKV) -> None:
        """The ledger claims a new durable end; nothing is published or freed yet."""

    def committed(self, sequence: SequenceKV) -> None:
        """The sequence was admitted, loaded, forked or committed: its complete pages are published by now."""

    def published(self, sequence: SequenceKV, group: int, page_number: int, page: int, key: bytes) -> None: ...

    def already_published(self, sequence: SequenceKV, group: int, page_number: int, page: int) -> None:
        """The index already holds an equal page under the key, so this sequence's own page stays private."""

    def admitted(self, sequence: SequenceKV) -> None:
        """Everything that the search found is held now."""

    def leaving(self, sequence: SequenceKV) -> None:
        """The sequence is about to be released; its end is published first, where the policy asks for that."""

    def end_kept(self, sequence: SequenceKV) -> None:
        """What a hit at the end of the sequence needs is published now, as far as the sequence holds it."""

    def forked(self, parent: SequenceKV, child: SequenceKV) -> None:
        """The child starts at the parent's committed end."""

    def imported(self, sequence: SequenceKV, group: int, interval: Interval) -> None:
        """The manager was told that these slots have arrived."""

    def completed(self, step: int) -> None: ...

    def ended(self, sequence: SequenceKV) -> None:
        """The sequence holds no pages any more."""

    def cache_reset(self) -> None: ...

    def started_over(self) -> None:
        """A move was interrupted half-way: all pages are free again, except quarantined ones."""


class PublishedPage(NamedTuple):
    """A page that enters the prefix index."""

    key: bytes
    bases: Sequence[bytes]
    """The bases of the chain from the page's start to its end, both included: one more than the page has blocks."""
    start: int
    """Position of the page's first token."""
    content: bytes
    """The page's tokens; empty if it holds media."""


class IndexListener(Protocol):
    """What is told which pages of the target can be found in the prefix index. It is called in the middle of moves, so
    it only takes notes."""

    def entered(self, group: int, namespace: tuple[str, str], pages: Sequence[PublishedPage]) -> None:
        """Pages of one sequence, whose (adapter, salt) is the namespace, are found from now on."""

    def left(self, group: int, keys: Sequence[bytes]) -> None:
        """The pages under these keys are not found any more."""

    def cleared(self) -> None:
        """Nothing is found any more."""
