"""A request as the scheduler sees it: tokens, limits, and where it stands."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from outrider.errors import RequestError
from outrider.kv.checked import checked_fields, checked_interval, is_word, text, true_or_false, tuple_of, whole_number
from outrider.kv.intervals import Interval
from outrider.kv.layout import KVLayout
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


def _is_sequence(value: object) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, Mapping)


def _short(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"


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
        text(self.id, "a request's id", empty=False, error=RequestError)
        what = f"request {self.id!r}"
        if isinstance(self.prompt, (str, bytes, bytearray, memoryview)) or not _is_sequence(self.prompt):
            raise RequestError(f"{what}: the prompt must be a sequence of token ids, got {_short(self.prompt)}")
        if not len(self.prompt):
            raise RequestError(f"{what}: the prompt is empty; send at least one token")
        for name in ("salt", "adapter"):
            text(getattr(self, name), f"{what}: {name}", error=RequestError)
        true_or_false(self.use_cache, f"{what}: use_cache", error=RequestError)
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise RequestError(f"{what}: priority must be a whole number, got {self.priority!r}; lower runs first")
        if not isinstance(self.stop_tokens, (frozenset, set)) or not all(map(is_word, self.stop_tokens)):
            raise RequestError(f"{what}: stop_tokens must be a set of token ids, got {self.stop_tokens!r}")
        whole_number(self.max_tokens, f"request {self.id!r}: max_tokens", at_least=1, error=RequestError)
        whole_number(self.n, f"request {self.id!r}: n", at_least=1, error=RequestError)
        if self.n > MOST_FORKS:
            raise RequestError(
                f"request {self.id!r}: n may be at most {MOST_FORKS}, got {self.n}; send several requests"
            )
        advice = "0 turns drafting off"
        whole_number(self.k, f"request {self.id!r}: k", at_least=0, advice=advice, error=RequestError)
        whole_number(self.prefilled_tokens, f"{what}: prefilled_tokens", at_least=0, error=RequestError)
        if self.prefilled_tokens >= len(self.prompt):
            raise RequestError(f"{what}: prefilled_tokens must lie inside the prompt")
        self._check_media(what)
        if self.remote is not None and not isinstance(self.remote, Mapping):
            raise RequestError(f"{what}: remote must map groups to Intervals, got {self.remote!r}")
        for group, interval in (self.remote or {}).items():
            whole_number(group, f"{what}: each group of remote", at_least=0, error=RequestError)
            checked_interval(interval, f"{what}: remote, group {group},", RequestError)

    def _check_media(self, what: str) -> None:
        tuple_of(self.media, Media, f"{what}: media", error=RequestError)
        done = 0
        for item in self.media:
            checked_interval(Interval(item.start, item.end), f"{what}: each of media", RequestError)
            if not done <= item.start < item.end <= len(self.prompt):
                raise RequestError(
                    f"{what}: media at [{item.start}, {item.end}) is empty, overlaps what comes before it, or leaves "
                    f"the prompt of {len(self.prompt)} tokens; give media in order, apart from each other"
                )
            if not isinstance(item.digest, bytes) or not item.digest:
                raise RequestError(f"{what}: media need the digest of their content as bytes, got {item.digest!r}")
            done = item.end


def check_remote(spec: RequestSpec, layout: KVLayout) -> None:
    """Refuse an offer that this worker's layout could not take."""
    assert spec.remote is not None
    unknown = [group for group in spec.remote if group >= len(layout.groups)]
    if unknown:
        raise RequestError(
            f"request {spec.id!r}: remote names group {unknown[0]}, but there are only {len(layout.groups)}; use "
            "offered_intervals() to make it"
        )
    if not set(spec.remote).issuperset(layout.target_groups):
        raise RequestError(f"request {spec.id!r}: the peer does not hold every target group; prefill it here")


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one request; only the scheduler changes it."""

    spec: RequestSpec
    id: str
    stop_tokens: frozenset[int]
    """Both are the spec's: every step asks for them."""
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
