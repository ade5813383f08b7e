"""What every drafter does: feed and propose, never one for the other.

feed     the draft model's prefill: writes the durable slots for newly committed tokens, at every step, whatever k is
propose  writes scratch and returns drafts; may be skipped for any request at any step
step     feeds, then proposes

The slots that a drafter reads and writes follow from its footprint; the runner reports them to the sanitizer from
there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.backends.attention import PagedKV
from outrider.backends.base import Argmax, Backend
from outrider.backends.batch import BatchBuilder
from outrider.errors import ExtensionError
from outrider.kv.footprint import KVFootprint
from outrider.kv.intervals import Interval
from outrider.models.kv_groups import LayerGroups
from outrider.speculative.lookup import LookupConfig
from outrider.speculative.vocabulary import DraftVocabulary


class DraftedRequest(Protocol):
    """What a drafter may know of a request."""

    @property
    def id(self) -> str: ...

    @property
    def tokens(self) -> array[int]:
        """Committed tokens, the last sampled one included."""

    @property
    def table_row(self) -> int:
        """The request's row in the block tables."""

    @property
    def draws_depend(self) -> bool:
        """Whether the tokens that may be drawn at a position depend on the drafts before it, as they do with
        penalties, a minimum length or a grammar."""


class FeedRow(NamedTuple):
    request: DraftedRequest
    interval: Interval
    """Durable slots to write."""
    taps_at: int
    """The row of this step's taps that belongs to interval.start."""
    proposes: bool
    """Whether a proposal for this request follows in this step."""


class ProposeRow(NamedTuple):
    request: DraftedRequest
    v: int
    """Position of the last sampled token; drafts are for v + 1 and on."""
    k: int
    """Most drafts that may be proposed."""
    tap_row: int | None = None
    """The row of this step's taps that belongs to the last accepted token, at v - 1; None if the drafter's footprint
    has no taps."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The drafts for one request, and how sure the drafter is of them, if it has an estimate of its own."""

    drafts: list[int]
    probabilities: Sequence[float] | None = None
    """For each draft, the probability that it is accepted if all drafts before it are. It decides how many drafts are
    verified. None: the probability of the largest logit decides."""

    @classmethod
    def of(cls, found: list[int] | Proposal) -> Proposal:
        return found if isinstance(found, Proposal) else cls(found)


def checked_proposals(
    drafter: str, found: object, rows: Sequence[ProposeRow], *, vocab_size: int
) -> Sequence[Proposal]:
    """Returns what a drafter proposed for these rows, or raises ExtensionError with what is wrong with it. A drafter
    may come from another package, and a wrong token id would end every request of the next step."""
    if not isinstance(found, Sequence) or len(found) != len(rows):
        got = f"{len(found)} of them" if isinstance(found, Sequence) else type(found).__name__
        raise ExtensionError(
            f"the drafter {drafter!r} must return a list of drafts or a Proposal for each of {len(rows)} rows, "
            f"not {got}"
        )
    proposals = []
    for row, each in zip(rows, found, strict=True):
        proposal = each if isinstance(each, Proposal) else Proposal(each)
        drafts, probabilities = proposal.drafts, proposal.probabilities
        if not isinstance(drafts, list):
            raise ExtensionError(
                f"the drafter {drafter!r} must return its drafts as a list of token ids, not as {type(drafts).__name__}"
            )
        if len(drafts) > row.k:
            raise ExtensionError(f"the drafter {drafter!r} proposed {len(drafts)} drafts where {row.k} were asked for")
        for token in drafts:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ExtensionError(
                    f"the drafter {drafter!r} proposed {token!r}; drafts are token ids from 0 to {vocab_size - 1}"
                )
        if probabilities is not None and not _are_probabilities(probabilities, len(drafts)):
            raise ExtensionError(
                f"the drafter {drafter!r} proposed {len(drafts)} draft(s) with the probabilities "
                f"{probabilities!r}; it must give one in [0, 1] for each draft, or None"
            )
        # A copy: a drafter may use its own list again before these drafts are verified.
        proposals.append(Proposal(drafts.copy(), probabilities))
    return proposals


def _are_probabilities(found: object, count: int) -> bool:
    return (
        isinstance(found, Collection)
        and len(found) == count
        and all(isinstance(probability, int | float) and 0 <= probability <= 1 for probability in found)
    )


class DrawRow(NamedTuple):
    """One draft to choose from logits: the one at `position`, after the drafts `before` it."""

    request: DraftedRequest
    position: int
    before: tuple[int, ...]


class Draw(Protocol):
    def __call__(
        self, logits: Tensor, rows: Sequence[DrawRow], vocabulary: DraftVocabulary, argmax: Argmax | None = None, /
    ) -> list[int]:
        """Chooses a draft for each row. `argmax`: that of the logits, where it is known already."""


class DraftServices(NamedTuple):
    """What the runner gives a drafter once memory is laid out."""

    batches: BatchBuilder
    groups: range
    """The drafter's groups in the layout."""
    kv: tuple[PagedKV, ...]
    """The pages of each of the drafter's layers."""
    draw: Draw
    """Choose as the target would if these were its logits: the same processors, the same noise."""
    worth_going_on: Callable[[DraftedRequest], bool]
    """Whether the drafts drawn for a request so far are likely enough that a further one may be verified."""


def draw_one_more(
    services: DraftServices,
    logits: Tensor,
    rows: Sequence[ProposeRow],
    drafts: Sequence[list[int]],
    drafting: Sequence[int],
    vocabulary: DraftVocabulary,
) -> list[int]:
    """Adds the next draft of each row that `drafting` numbers; `logits` has one row for each of them. Returns the
    indices into `drafting` of the rows that go on: they may have more drafts, and are likely enough to."""
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


def tap_rows(taps: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the taps of runs of rows (first, count), one after the other: [rows, taps * hidden]."""
    first, end = runs[0][0], sum(runs[0])
    for start, count in runs[1:]:
        if start != end:
            rows = [row for start, count in runs for row in range(start, start + count)]
            return taps[torch.tensor(rows, device=taps.device)]
        end += count
    # Where nothing was rejected, the runs follow each other, and no row need be copied.
    return taps[first:end]


class Drafter:
    """A loaded drafter. It implements `propose`, or `step` if its proposals read taps."""

    footprint: KVFootprint
    layer_groups: LayerGroups | None = None
    """The drafter's layers in their KV groups; None for a drafter without KV."""
    backend: Backend | None = None
    """Given by a drafter that enqueues passes: the backend that it was loaded for."""
    default_k: int = 4
    """Number of drafts per step if the user does not choose one; the most, where the engine chooses."""
    lookup: LookupConfig | None = None
    """Given by a drafter that does nothing but look up: where the engine chooses how much is drafted, it looks up with
    these settings itself, at any step and in finished texts too, and never calls `propose`."""

    def bind(self, services: DraftServices) -> None:
        """Called once, before anything else."""

    def feed(self, rows: Sequence[FeedRow], taps: Tensor) -> None:
        """Writes the durable slots of every row. `taps` are the hidden states of this step's target rows, those of
        several layers side by side; they are valid until the step ends."""

    def step(
        self, feeds: Sequence[FeedRow], taps: Tensor, proposals: Sequence[ProposeRow]
    ) -> Sequence[list[int] | Proposal]:
        """Feeds, then proposes; either list may be empty. Override it to read `taps` when proposing, at the rows'
        `tap_row`, or to do both in one pass."""
        if feeds:
            self.feed(feeds, taps)
        return self.propose(proposals) if proposals else []

    def propose(self, rows: Sequence[ProposeRow]) -> Sequence[list[int] | Proposal]:
        """Returns at most k drafts for each row, however unlikely they are."""
        raise NotImplementedError(f"{type(self).__name__} implements neither propose nor step")

    def forget(self, request_id: str) -> None:
        """Drops what is kept for a request that has ended."""
