"""A request as the scheduler sees it: tokens, limits, and where it stands."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from outrider.errors import RequestError
from outrider.kv.checked import checked_fields, text, whole_number
from outrider.kv.intervals import Interval
from outrider.kv.ledger import SequenceKV
from outrider.kv.prefix import Media
from outrider.scheduler.pacing.pacer import RequestPace
from outrider.scheduler.plan import ScheduledRequest

MAX_TOKEN_ID = (1 << 32) - 1
MOST_FORKS = 1024
"""The most continuations of one prompt."""


class State(Enum):
    FETCHING = "fetching"
    """Waits to hear what a prefill worker, or a tier, holds of its prompt's KV; it holds nothing yet."""
    WAITING = "waiting"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    HELD = "held"
    """Prefilled on this worker, and kept until the decode worker has fetched it."""
    FINISHED = "finished"


def token_array(tokens: Iterable[int], what: str = "prompt") -> array[int]:
    """Returns token ids as raw 32-bit words; refuses anything that is not one."""
    try:
        if isinstance(tokens, list):
            words = array("I")
            words.fromlist(tokens)  # a third faster than going through an iterator
            return words
        return array("I", tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(
            f"{what}: every token id must be a whole number from 0 to {MAX_TOKEN_ID}: {error}"
        ) from error


@checked_fields(RequestError)
@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpec:
    """What a caller asks for."""

    id: str
    """What errors call the request."""
    prompt: Sequence[int]
    """Token ids. An array of 32-bit words becomes the request's own record of its tokens, and grows with it."""
    max_tokens: int
    k: int = 0
    """Most drafts per step."""
    fixed_k: bool = False
    """Whether k drafts are proposed and verified at every step, even where a scheduler chooses for other requests."""
    priority: int = 0
    """Lower runs first."""
    stop_tokens: frozenset[int] = frozenset()
    sequence_ids: tuple[str, ...] = ()
    """One key for each continuation, which no other sequence of this scheduler has; by default `id`, for one
    continuation. The first continuation runs the prompt, the others (forks) share it."""
    salt: str = ""
    adapter: str = ""
    media: tuple[Media, ...] = ()
    use_cache: bool = True
    """False for prompt log-probabilities: every prompt row must be computed."""
    hand_over: bool = False
    """Whether the request ends with its first token, whatever that is, and its KV is held for a decode worker. Drafts
    are proposed as if it went on: the decode worker verifies them."""
    awaits_peer: bool = False
    """Whether a prefill worker has computed the prompt: the request is FETCHING until `Scheduler.fetched` says what
    that worker holds, or `Scheduler.not_fetched` that it holds nothing."""
    awaits_tiers: bool = False
    """Whether tiers are asked for the prompt's KV: the request is FETCHING until `Scheduler.looked_up`."""
    compute_prompt: bool = False
    """Whether a decode worker that leaves prompts to others computes this one all the same."""

    def __post_init__(self) -> None:
        text(self.id, "a request's id", empty=False, error=RequestError)
        what = f"request {self.id!r}"
        if not len(self.prompt):
            raise RequestError(f"{what}: the prompt is empty; send at least one token")
        whole_number(self.max_tokens, f"{what}: max_tokens", at_least=1, error=RequestError)
        if not self.sequence_ids:
            object.__setattr__(self, "sequence_ids", (self.id,))
        advice = "0 turns drafting off"
        whole_number(self.k, f"{what}: k", at_least=0, advice=advice, error=RequestError)
        if self.hand_over and self.awaits_peer:
            raise RequestError(f"{what}: a prompt that another worker has computed cannot be handed over again")
        if self.awaits_peer and self.awaits_tiers:
            raise RequestError(f"{what}: a prompt that a prefill worker has computed is not looked up in tiers")
        done = 0
        for item in self.media:
            if not done <= item.start < item.end <= len(self.prompt):
                raise RequestError(
                    f"{what}: media at [{item.start}, {item.end}) is empty, overlaps what comes before it, or leaves "
                    f"the prompt of {len(self.prompt)} tokens; give media in order, apart from each other"
                )
            if not item.digest:
                raise RequestError(f"{what}: media need the digest of their content as bytes, got {item.digest!r}")
            done = item.end

    @property
    def n(self) -> int:
        """Number of continuations of the prompt."""
        return len(self.sequence_ids)


@dataclass(slots=True, eq=False)
class Request:
    """The record of one sequence: a request, or a fork of one. Only the scheduler changes it.

    The runner and the outputs refer to `tokens` and `spec` instead of keeping copies of them.
    """

    spec: RequestSpec
    id: str
    """The sequence's own key, one of spec.sequence_ids."""
    tokens: array[int]
    """The prompt and what was generated, as far as it is committed. While a step runs, the runner keeps the tokens that
    it sampled at the end, and takes them back before the step is committed."""
    arrival: int
    kv: SequenceKV
    prompt_len: int
    max_total: int
    """prompt_len + max_tokens, clipped to the model's limit."""
    k: int
    full_k_until: int
    """Up to this v the drafter's and the model's limits leave room for all k drafts."""
    may_draft: bool
    wanted: int
    """Number of drafts to propose in the next step: k, unless a pacer chooses it."""
    pace: RequestPace | None = None
    """What the pacer knows of the request; None if it always gets k drafts."""
    remote: Mapping[int, Interval] | None = None
    """What a prefill worker holds for the prompt, per group."""
    carried_drafts: int = 0
    """Number of drafts that came with the first token from a prefill worker, and that wait for the first step here."""
    state: State = State.WAITING
    epoch: int = 0
    """Raised whenever the request's KV starts anew (preemption, a load that ended or was lost): rows of an earlier
    epoch no longer say anything about the KV."""
    drafts: int = 0
    """Number of drafts that wait for verification."""
    proposed: int = 0
    """Number of drafts that the last proposal wrote scratch for."""
    queue_entry: int = 0
    """The request's entry in the waiting queue; 0 while it does not wait."""
    planned_step: int = -1
    """The last step that has rows of this request."""
    flight: list[ScheduledRequest] = field(default_factory=list)
    """Rows of steps that were planned and not committed, oldest first."""
    fresh: bool = True
    """Whether the drafter may have to catch up: no row has run since the request was admitted, or feeding is behind."""
    preemptions: int = 0
    protected: bool = False
    stalled: bool = False
    """Whether the last attempt to plan rows found too few pages."""

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The order in which requests run. Protected requests go before all others, so that none starves."""
        return (not self.protected, self.spec.priority, self.arrival)

    @property
    def in_transfer(self) -> bool:
        """Whether KV of this request is, or was, to come from a peer or a tier, or is held for a peer."""
        return self.state in (State.FETCHING, State.LOADING, State.HELD) or self.remote is not None

    @property
    def context(self) -> int:
        """Number of positions that are committed."""
        return self.kv.committed

    @property
    def generated(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_len

    def cut_at_end(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
        """Returns the next tokens up to the first stop token or the length limit, and what ended them."""
        if self.spec.hand_over:
            return tokens[:1], "prefilled"
        finish = None
        stop = self.spec.stop_tokens
        if stop:
            for place, token in enumerate(tokens):
                if token in stop:
                    tokens, finish = tokens[: place + 1], "stop"
                    break
        room = max(0, self.max_total - len(self.tokens))
        if len(tokens) >= room:
            if len(tokens) > room or finish is None:
                finish = "length"
            tokens = tokens[:room]
        return tokens, finish
