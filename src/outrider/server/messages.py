"""What the front end and the engine process tell each other: typed, as MessagePack, one message per ZMQ frame.

    front end ──Submit, Abort, ResetCache, LookAtPages, AreYouAlive, Stop──▶ engine process
    front end ◀──Loading, Ready | Broken, Accepted, Refused, StepReport, CacheWasReset, Pages, Alive── engine process

Nothing is ever unpickled: a frame that is no such message is refused by the decoder.
"""

from __future__ import annotations

import msgspec

from outrider.config import EngineConfig
from outrider.sampling import SamplingParams


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base of all of them. As arrays: names of fields do not travel."""


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Part of a message."""


# ---- to the engine ---------------------------------------------------------------------------------


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on the engine process's standard input, as JSON. When that input ends, the process ends."""

    endpoint: str
    engine: EngineConfig
    grammar_compile_limit_s: float


class Submit(Message, frozen=True, kw_only=True):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    """When the client's request arrived; times are of the machine's monotonic clock, which processes share."""
    tenant: str = ""
    """Who is told what the prefix cache gave to it."""
    salt: str = ""
    priority: int = 0
    speculate: bool = True
    stream: bool = True
    """False: one delta, at the end."""


class Abort(Message, frozen=True, kw_only=True):
    request_id: str


class ResetCache(Message, frozen=True, kw_only=True):
    call: int


class LookAtPages(Message, frozen=True, kw_only=True):
    call: int


class AreYouAlive(Message, frozen=True, kw_only=True):
    pass


class Stop(Message, frozen=True, kw_only=True):
    pass


ToEngine = Submit | Abort | ResetCache | LookAtPages | AreYouAlive | Stop


# ---- to the front end ------------------------------------------------------------------------------


class Loading(Message, frozen=True, kw_only=True):
    what: str
    done: int
    total: int


class Broken(Message, frozen=True, kw_only=True):
    """The engine could not be built; the process ends."""

    kind: str
    """The error's class."""
    message: str


class Facts(Record, frozen=True, kw_only=True):
    """What the front end must know of the engine."""

    model_name: str
    fingerprint: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    device: str
    dtype: str
    tokenizer: str
    """As the tokenizers library writes it."""
    tokenizer_source: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    templates: dict[str, str]
    """Empty for a model that is not made for conversations."""
    template_source: str
    template_variables: dict[str, str]
    sampling_defaults: dict[str, float]
    """What the model's makers recommend; only what they say."""
    drafter: str | None
    drafts_max: int
    kv_tokens: int
    supports_grammars: bool
    sanitizer: str


class Ready(Message, frozen=True, kw_only=True):
    facts: Facts


class Accepted(Message, frozen=True, kw_only=True):
    request_id: str


class Refused(Message, frozen=True, kw_only=True):
    request_id: str
    message: str
    is_ours: bool = False
    """The engine failed; the request may be right."""
    is_for_now: bool = False
    """The same request may be served later."""


class Scored(Record, frozen=True, kw_only=True):
    token: int
    logprob: float
    top: list[tuple[int, float]]


class SpeculationFigures(Record, frozen=True, kw_only=True):
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_at: list[int]


class Ending(Record, frozen=True, kw_only=True):
    """Of a whole request, all its continuations."""

    arrival_s: float
    """At the front end."""
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    prompt_tokens: int
    generated_tokens: int
    longest_tokens: int = 0
    """Of the longest continuation."""
    cached_tokens: int
    steps: int
    speculation: SpeculationFigures
    prompt_logprobs: list[Scored | None] | None = None
    error: str | None = None


class Delta(Record, frozen=True, kw_only=True):
    """What one continuation gained. The pieces of its tokens, put together, are its text."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    pieces: list[str]
    origins: str
    """One letter for each token: the first of its origin's name."""
    logprobs: list[Scored] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ending: Ending | None = None


class Counters(Record, frozen=True, kw_only=True):
    """Totals since the engine started, and how things stand."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    aborted: int = 0
    """Requests whose clients left."""
    preemptions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    external_queried_tokens: int = 0
    external_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = []
    dropped_drafts: int = 0
    violations: int = 0
    """Broken invariants that the sanitizer has seen."""


class StepReport(Message, frozen=True, kw_only=True):
    deltas: list[Delta]
    counters: Counters
    gaps_s: list[float]
    """Times between two steps that yielded tokens for the same request, since the last report."""


class CacheWasReset(Message, frozen=True, kw_only=True):
    call: int


class ArenaPages(Record, frozen=True, kw_only=True):
    page_bytes: int
    pages: int
    states: str
    """Runs of pages in the same state, such as 1k12h3s40f: see kv.census."""


class GroupPageCounts(Record, frozen=True, kw_only=True):
    name: str
    arena: int
    kind: str
    page_tokens: int
    held: int
    published: int


class RecentHit(Record, frozen=True, kw_only=True):
    number: int
    """Requests of its tenant since the engine started: who watches can tell new ones from those already seen."""
    age_s: float
    prompt_tokens: int
    cached_tokens: int


class Pages(Message, frozen=True, kw_only=True):
    call: int
    step: int
    arenas: list[ArenaPages]
    groups: list[GroupPageCounts]
    recent_hits: dict[str, list[RecentHit]]
    """By tenant, the latest first."""


class Alive(Message, frozen=True, kw_only=True):
    """Said between two steps."""

    steps: int
    """Done so far."""
    has_work: bool


ToFront = Loading | Broken | Ready | Accepted | Refused | StepReport | CacheWasReset | Pages | Alive

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
