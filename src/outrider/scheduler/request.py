"""A request as the scheduler sees it: tokens, limits, and where it stands."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from outrider.errors import RequestError
from outrider.kv.checked import checked_fields, whole_number
from outrider.kv.intervals import Interval
from outrider.kv.ledger import SequenceKV
from outrider.kv.prefix import Media
from outrider.scheduler.plan import StepRow

MAX_TOKEN_ID = (1 << 32) - 1
MOST_FORKS = 1024


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    HELD = "held"
    """Prefilled here, kept until the decode side has fetched it."""
    FINISHED = "finished"


def token_array(tokens: Iterable[int], what: str = "prompt") -> array[int]:
    """Token ids as raw 32-bit words; refuses anything that is not one."""
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
    prompt: Sequence[int]
    max_tokens: int
    k: int = 0
    """Most drafts per step."""
    priority: int = 0
    """Lower runs first."""
    stop_tokens: frozenset[int] = frozenset()
    n: int = 1
    salt: str = ""
    adapter: str = ""
    media: tuple[Media, ...] = ()
    use_cache: bool = True
    """False for prompt log-probabilities: every prompt row must be computed."""
    remote: Mapping[int, Interval] | None = None
    """What a prefill worker holds for this prompt, per group; the last token of `prompt` is the one it sampled."""
    prefilled_tokens: int = 0
    """How many tokens at the end of `prompt` count as generated already."""

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise RequestError(f"request {self.id!r}: the prompt is empty; send at least one token")
        whole_number(self.max_tokens, f"request {self.id!r}: max_tokens", at_least=1, error=RequestError)
        whole_number(self.n, f"request {self.id!r}: n", at_least=1, error=RequestError)
        if self.n > MOST_FORKS:
            raise RequestError(
                f"request {self.id!r}: n may be at most {MOST_FORKS}, got {self.n}; send several requests"
            )
        advice = "0 turns drafting off"
        whole_number(self.k, f"request {self.id!r}: k", at_least=0, advice=advice, error=RequestError)
        if not 0 <= self.prefilled_tokens < len(self.prompt):
            raise RequestError(f"request {self.id!r}: prefilled_tokens must lie inside the prompt")


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one request; only the scheduler changes it."""

    spec: RequestSpec
    id: str
    """The spec's: every step asks for it."""
    tokens: array[int]
    arrival: int
    kv: SequenceKV
    prompt_len: int
    max_total: int
    """prompt_len + max_tokens, clipped to the model's limit."""
    k: int
    full_k_until: int
    """Up to this v the drafter's and the model's limits leave room for all k drafts."""
    may_draft: bool
    state: State = State.WAITING
    epoch: int = 0
    """Raised by preemption: rows of an earlier epoch no longer speak for the KV."""
    drafts: int = 0
    """Drafts that wait for verification."""
    proposed: int = 0
    queue_entry: int = 0
    """Its place in the waiting queue, or 0 when it does not wait."""
    planned_step: int = -1
    """The last step that counts on this request."""
    flight: list[StepRow] = field(default_factory=list)
    fresh: bool = True
    """No row since admission: tap rows may be due."""
    preemptions: int = 0
    protected: bool = False
    stalled: bool = False
    finish: str | None = None

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Who goes first. Protected requests go before all others, so that nobody starves."""
        return (not self.protected, self.spec.priority, self.arrival)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len
