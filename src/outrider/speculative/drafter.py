"""What every drafter does: feed and propose, never one for the other.

feed     writes the durable slots for newly committed tokens; runs at every step, whatever k is
propose  writes scratch and returns drafts; may be skipped for any request at any step
step     both, in this order

What it writes where follows from its footprint; the runner reports it to the sanitizer from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from outrider.kv.footprint import KVFootprint
from outrider.kv.intervals import Interval
from outrider.layers.attention import PagedKV
from outrider.layers.ops import Greatest
from outrider.layers.rows import RowBuilder
from outrider.models.kv_groups import LayerGroups
from outrider.speculative.vocabulary import DraftVocabulary


class DraftedRequest(Protocol):
    """What a drafter may know of a request."""

    @property
    def id(self) -> str: ...

    @property
    def tokens(self) -> array[int]:
        """Committed tokens, the last sampled one included."""

    @property
    def line(self) -> int:
        """Its line in the page tables."""

    @property
    def draws_depend(self) -> bool:
        """Does what may be drawn at a position depend on the drafts before it (penalties, a least length, a form)?"""


class FeedRow(NamedTuple):
    request: DraftedRequest
    interval: Interval
    """Durable slots to write."""
    taps_at: int
    """The row of the tapped hidden states that belongs to interval.start."""
    proposes: bool
    """A proposal follows in this step."""


class ProposeRow(NamedTuple):
    request: DraftedRequest
    v: int
    """The last sampled token sits here; drafts are for v + 1 and on."""
    k: int


class DrawRow(NamedTuple):
    """One draft to choose from logits: the one at `position`, after the drafts `before` it."""

    request: DraftedRequest
    position: int
    before: tuple[int, ...]


class Draw(Protocol):
    def __call__(
        self, logits: Tensor, rows: Sequence[DrawRow], vocabulary: DraftVocabulary, found: Greatest | None = None, /
    ) -> list[int]:
        """`found`: the largest of these logits, where somebody has looked already."""


class DraftServices(NamedTuple):
    """What the runner lends to a drafter once memory is laid out."""

    rows: RowBuilder
    groups: range
    """The drafter's groups in the layout."""
    kv: tuple[PagedKV, ...]
    """Per layer of the drafter."""
    draw: Draw
    """Choose as the target would if these were its logits: the same processors, the same noise."""
    weighs: Callable[[], bool]
    """Whether drawing asks how likely drafts are."""
    worth_going_on: Callable[[DraftedRequest], bool]
    """Whether the drafts drawn for it so far are likely enough that a further one may count."""


def draw_one_more(
    services: DraftServices,
    logits: Tensor,
    rows: Sequence[ProposeRow],
    drafts: Sequence[list[int]],
    drafting: Sequence[int],
    vocabulary: DraftVocabulary,
) -> list[int]:
    """Add the next draft of each row that `drafting` numbers; `logits` has a line for each of them. Returns the places
    in `drafting` of those that go on: they may have more drafts, and it is worth it."""
    draws = [
        DrawRow(rows[number].request, rows[number].v + 1 + len(drafts[number]), tuple(drafts[number]))
        for number in drafting
    ]
    for number, token in zip(drafting, services.draw(logits, draws, vocabulary), strict=True):
        drafts[number].append(token)
    return [
        place
        for place, number in enumerate(drafting)
        if len(drafts[number]) < rows[number].k and services.worth_going_on(rows[number].request)
    ]


class Drafter(ABC):
    footprint: KVFootprint
    layer_groups: LayerGroups | None = None
    """Its layers in their groups; None for a drafter without KV."""
    usual_k: int = 4
    """How many drafts it is asked for where the user does not say."""

    def bind(self, services: DraftServices) -> None:
        """Called once, before anything else."""

    def feed(self, rows: Sequence[FeedRow], taps: Tensor) -> None:
        """Write the durable slots of every row. `taps`: hidden states of this step's target rows, side by side; they
        last until the step ends."""

    def step(self, feeds: Sequence[FeedRow], taps: Tensor, proposals: Sequence[ProposeRow]) -> list[list[int]]:
        """Feed, then propose; either may be nothing. For drafters that are quicker with both at once."""
        if feeds:
            self.feed(feeds, taps)
        return self.propose(proposals) if proposals else []

    @abstractmethod
    def propose(self, rows: Sequence[ProposeRow]) -> list[list[int]]:
        """At most k drafts for each row: all that were made, however unlikely."""

    def forget(self, request_id: str) -> None:
        """The request has ended."""
