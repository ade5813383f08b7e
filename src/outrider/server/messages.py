"""Messages between the front end and the engine process: typed, as MessagePack, one message per ZMQ frame.

    front end ──Submit, Abort, ResetCache, LookAtPages, LookAtTransfers, LookAtSpeculation, Ping, Stop──▶ engine process
    front end ◀──Loading, Ready | Broken, Accepted, Refused, StepReport, CacheWasReset, Pages, Transfers,
                  Speculation, Pong──

Nothing is ever unpickled: the decoder refuses a frame that is none of these messages.
"""

from __future__ import annotations

import msgspec

from outrider.config import EngineConfig
from outrider.engine.speculation import SpeculationCounts
from outrider.models.tokenizer import Tokenizer, tokenizer_from_json
from outrider.sampling import SamplingParams
from outrider.scheduler.pacing.figures import Choice, PacingCounts


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base of all messages. They are encoded as arrays, without field names."""


class Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of the parts of messages."""


# ---- to the engine ---------------------------------------------------------------------------------


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on the engine process's standard input, as JSON. When that input ends, the process ends."""

    endpoint: str
    engine: EngineConfig


class Submit(Message, frozen=True, kw_only=True):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    """When the client's request arrived. All times are of the machine's monotonic clock, which processes share."""
    tenant: str = ""
    """The tenant among whose recent cache hits this request is listed."""
    salt: str = ""
    priority: int = 0
    speculate: bool = True
    num_speculative_tokens: int | None = None
    """How many drafts to propose and verify at each step; None leaves it to the engine."""
    stream: bool = True
    """False for one delta, at the end."""
    hand_over: bool = False
    """Whether the request ends with its first token, and its KV is held for a decode worker."""
    ticket: str | None = None
    """What leads to the KV that a prefill worker holds for this request."""
    compute_prompt: bool = False
    """Whether a decode worker that otherwise computes no prompts computes this one."""


class Abort(Message, frozen=True, kw_only=True):
    request_id: str


class ResetCache(Message, frozen=True, kw_only=True):
    call: int


class LookAtPages(Message, frozen=True, kw_only=True):
    call: int


class LookAtTransfers(Message, frozen=True, kw_only=True):
    call: int


class LookAtSpeculation(Message, frozen=True, kw_only=True):
    call: int


class Ping(Message, frozen=True, kw_only=True):
    pass


class Stop(Message, frozen=True, kw_only=True):
    pass


ToEngine = Submit | Abort | ResetCache | LookAtPages | LookAtTransfers | LookAtSpeculation | Ping | Stop


# ---- to the front end ------------------------------------------------------------------------------


class Loading(Message, frozen=True, kw_only=True):
    what: str
    done: int
    total: int


class Broken(Message, frozen=True, kw_only=True):
    """The engine could not be built; the process ends."""

    kind: str
    """Name of the error's class."""
    message: str


class TextFacts(Record, frozen=True, kw_only=True):
    """What turns text into tokens, in the front end and in text processes."""

    tokenizer: str
    """The tokenizer, as JSON of the tokenizers library."""
    tokenizer_source: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    templates: dict[str, str]
    """Chat templates by name; empty for a model that has none."""
    template_source: str
    template_variables: dict[str, str]

    def make_tokenizer(self) -> Tokenizer:
        return tokenizer_from_json(
            self.tokenizer, source=self.tokenizer_source, bos_id=self.bos_id, eos_ids=self.eos_ids
        )


class TransferFacts(Record, frozen=True, kw_only=True):
    """An engine's part in prefill/decode disaggregation. It changes when the engine process is replaced."""

    connector: str
    role: str
    load_failure_policy: str
    endpoint: str
    """Where other workers reach this one."""
    engine: str
    """The engine's id, which is new at each start."""
    protocol: int
    layout_digest: str
    """Digest of the protocol and of the target's KV, in hexadecimal digits: workers that differ in it cannot exchange
    KV."""
    lease_s: float

    @property
    def hands_over(self) -> bool:
        return self.role != "kv_consumer"

    @property
    def fetches(self) -> bool:
        return self.role != "kv_producer"


class Facts(Record, frozen=True, kw_only=True):
    """What the front end must know about the engine."""

    model_name: str
    fingerprint: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    device: str
    dtype: str
    text: TextFacts
    sampling_defaults: dict[str, float]
    """The settings that the model's makers recommend."""
    drafter: str | None
    drafts_max: int
    chooses_drafts: bool = False
    """Whether the engine chooses at each step how much is drafted."""
    kv_tokens: int
    supports_grammars: bool
    sanitizer: str
    transfer: TransferFacts | None = None
    """None for an engine that neither hands KV over nor takes it."""


class Ready(Message, frozen=True, kw_only=True):
    facts: Facts


class Accepted(Message, frozen=True, kw_only=True):
    request_id: str


class Refused(Message, frozen=True, kw_only=True):
    request_id: str
    message: str
    is_engine_fault: bool = False
    """Whether the engine failed, so that nothing may be wrong with the request."""
    is_for_now: bool = False
    """Whether the same request may be served later."""


class Scored(Record, frozen=True, kw_only=True):
    token: int
    logprob: float
    top: list[tuple[int, float]]


class TransferFigures(Record, frozen=True, kw_only=True):
    """What it took to move one prompt's KV from its prefill worker: see engine.outputs.TransferTimes."""

    queued_s: float
    read_s: float
    confirmed_s: float
    bytes: int


class Ending(Record, frozen=True, kw_only=True):
    """How a whole request ended, with all its continuations."""

    arrival_s: float
    """When the request arrived at the front end."""
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    prompt_tokens: int
    generated_tokens: int
    longest_tokens: int = 0
    """Number of tokens of the longest continuation."""
    cached_tokens: int
    steps: int
    speculation: SpeculationCounts
    prompt_logprobs: list[Scored | None] | None = None
    error: str | None = None
    is_engine_fault: bool = True
    """Whether the engine caused the error, and not the request's own settings."""
    error_code: str | None = None
    """A name for the error that programs can test for."""
    ticket: str | None = None
    """What a decode worker needs to take the request over, if it was handed over with its KV."""
    transferred_tokens: int = 0
    """Number of prompt tokens whose KV came from a prefill worker."""
    transfer: TransferFigures | None = None


class Delta(Record, frozen=True, kw_only=True):
    """What one continuation gained. The joined pieces of its tokens are its text."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    pieces: list[str]
    origins: str
    """One letter for each token: the first letter of its origin's name."""
    logprobs: list[Scored] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ending: Ending | None = None


class TierFigures(Record, frozen=True, kw_only=True):
    """What a tier behind the KV cache has done since the engine started: `transfer.cache_tier.TierCounters`."""

    looked_up: int = 0
    found: int = 0
    loaded: int = 0
    missed: int = 0
    refused: int = 0
    stored: int = 0
    not_stored: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    look_up_s: float = 0.0
    load_s: float = 0.0
    store_s: float = 0.0


class Counters(Record, frozen=True, kw_only=True):
    """Totals since the engine started, and current figures."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    aborted: int = 0
    """Number of requests whose clients disconnected."""
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
    choice: Choice | None = None
    """What the engine chooses to draft now; None where it does not choose."""
    drafting_steps: int = 0
    plain_steps: int = 0
    probes: int = 0
    pauses: int = 0
    offered_by_source: list[int] = []
    """Drafts that were proposed, by Source; empty where the engine does not choose."""
    verified_by_source: list[int] = []
    accepted_by_source: list[int] = []
    lookups: int = 0
    own_lookup_hits: int = 0
    shared_lookup_hits: int = 0
    lookup_tokens: int = 0
    """Number of tokens of finished texts that are kept for look-up."""
    lookup_memory_bytes: int = 0
    violations: int = 0
    """Number of broken invariants that the sanitizer has seen."""
    handed_over: int = 0
    hand_overs_refused: int = 0
    leases_expired: int = 0
    fetches: int = 0
    fetch_failures: int = 0
    draft_groups_missing: int = 0
    recomputed_prompts: int = 0
    transferred_bytes: int = 0
    fences: int = 0
    held_pages: int = 0
    """Number of pages that are held for decode workers now."""
    leases: int = 0
    """Number of prompts whose KV is held for decode workers now."""
    tiers: dict[str, TierFigures] = {}
    """By the names of tiers behind the KV cache, the nearest first."""


class StepReport(Message, frozen=True, kw_only=True):
    deltas: list[Delta]
    counters: Counters
    gaps_s: list[float]
    """Times between two steps that yielded tokens for the same request, measured since the last report."""


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
    """Number of the tenant's requests since the engine started, by which a viewer tells new hits from known ones."""
    at_s: float
    """When the request was scheduled, by the machine's monotonic clock."""
    prompt_tokens: int
    cached_tokens: int


class Pages(Message, frozen=True, kw_only=True):
    call: int
    step: int
    arenas: list[ArenaPages]
    groups: list[GroupPageCounts]
    recent_hits: dict[str, list[RecentHit]]
    """Recent hits of each tenant, the latest first."""


class Transfers(Message, frozen=True, kw_only=True):
    call: int
    transport: str
    """How bytes travel: the link, and what it has chosen for each peer."""
    counters: dict[str, int]
    """Totals of this engine process by name, and what is held now."""


class LookupFigures(Record, frozen=True, kw_only=True):
    """What was looked up since the engine started, and what is kept for it."""

    lookups: int
    own_hits: int
    shared_hits: int
    shared_tokens: int
    memory_bytes: int


class Speculation(Message, frozen=True, kw_only=True):
    """How much the engine speculates and why."""

    call: int
    drafter: str | None
    drafts_max: int
    choice: Choice | None
    """None where the engine does not choose, as in all of the following."""
    costs: dict[str, list[tuple[int, float]]] | None
    """Seconds that parts of a step take, by number of rows, positions or requests."""
    counts: PacingCounts | None
    lookup: LookupFigures | None
    """None where nothing is looked up."""


class Pong(Message, frozen=True, kw_only=True):
    """The answer to Ping, sent between two steps."""

    steps: int
    """Number of steps so far."""
    has_work: bool


ToFront = (
    Loading | Broken | Ready | Accepted | Refused | StepReport | CacheWasReset | Pages | Transfers | Speculation | Pong
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
