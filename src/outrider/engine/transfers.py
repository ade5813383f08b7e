"""An engine's part in hand-offs: tickets from its callers, its memory, and what its checker must be told.

The driver (`transfer/driver.py`) moves the KV; this file is where it meets the engine.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock

from outrider.config import KVTransferConfig
from outrider.errors import ConfigError, RequestError
from outrider.kv.intervals import Interval, SlotRun
from outrider.kv.ledger import Load
from outrider.runner.page_store import PageStore
from outrider.sampling import SamplingParams
from outrider.sanitizer import Sanitizer
from outrider.sanitizer.shadow import DURABLE
from outrider.sanitizer.tiers import TierWatch
from outrider.scheduler import LoadFailure, Role, Scheduler
from outrider.transfer.cache_tier import CacheTier
from outrider.transfer.desk import Desk
from outrider.transfer.driver import TransferDriver
from outrider.transfer.hand_offs import Settled
from outrider.transfer.lending import Lender
from outrider.transfer.link import Link
from outrider.transfer.links.memory import MemoryMap
from outrider.transfer.links.none import NoLink
from outrider.transfer.messages import PROTOCOL
from outrider.transfer.offers import OfferedGroup, layout_digest, prompt_binding
from outrider.transfer.records import RENEWALS_PER_LEASE, Fetched, FirstToken, TransferLimits
from outrider.transfer.tickets import ClusterKey, Ticket

logger = logging.getLogger("outrider.transfer")

ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}
SETTINGS_BYTES = 16


def role_of(config: KVTransferConfig | None) -> Role:
    return Role.BOTH if config is None else ROLES[config.kv_role]


def load_failure_of(config: KVTransferConfig | None) -> LoadFailure:
    return LoadFailure.RECOMPUTE if config is None else LoadFailure(config.kv_load_failure_policy)


def check_transfer_config(config: KVTransferConfig | None) -> None:
    """Raises ConfigError for what can be known to be wrong before a model is loaded."""
    if config is None:
        return
    if config.cluster_key is None:
        raise ConfigError(
            "kv_transfer_config needs a cluster key, the same for all workers; give --cluster-key @FILE, or "
            "cluster_key in Python"
        )
    ClusterKey(config.cluster_key)
    if config.kv_connector == "nixl":
        from outrider.transfer.links.machine import checked_address
        from outrider.transfer.links.nixl_agent import load_nixl

        checked_address(config.kv_ip)
        load_nixl()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """What other workers, and the people who run them, must know about this one. No field is secret."""

    connector: str
    role: str
    load_failure_policy: str
    endpoint: str
    engine: str
    protocol: int
    layout_digest: str
    lease_s: float


class EngineTransfers:
    def __init__(
        self,
        config: KVTransferConfig | None,
        scheduler: Scheduler,
        store: PageStore,
        *,
        vocab_size: int,
        tiers: list[CacheTier],
        sanitizer: Sanitizer | None = None,
        compare_bytes: bool = False,
    ) -> None:
        """`config`: None for an engine without peers, which has tiers behind its device only."""
        check_transfer_config(config)
        self.exchanges_kv = config is not None
        """Whether this engine hands KV over to other workers, or takes it from them."""
        self.engine = secrets.token_hex(8)
        self.config = config = config or KVTransferConfig(cluster_key=secrets.token_hex(32))
        assert config.cluster_key is not None
        self._key = ClusterKey(config.cluster_key)
        self._store = store
        self._scheduler = scheduler
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._wake_lock = Lock()
        self._is_open = True
        limits = TransferLimits(
            lease_s=config.lease_s,
            renew_s=config.lease_s / RENEWALS_PER_LEASE,
            answer_s=config.answer_limit_s,
            read_s=config.read_limit_s,
            held_share=config.held_share,
        )
        lender = Lender(
            scheduler,
            engine=self.engine,
            key=self._key,
            limits=limits,
            clock=time.monotonic,
            time_of_day=time.time,
            digest_slots=self._digest_held,
            on_ended=self.wake,
        )
        self.link: Link = NoLink()
        if self.exchanges_kv:
            self.link = make_link(config, store.memory_map(), lender.desk, self._key, engine=self.engine)
        checks = None if sanitizer is None else SlotChecks(sanitizer, scheduler, store, compare_bytes)
        self.tiers = tiers
        tier_checks = None if sanitizer is None or not tiers else TierWatch(sanitizer, scheduler.kv, tiers)
        self.driver = TransferDriver(
            scheduler,
            self.link,
            lender,
            clock=time.monotonic,
            time_of_day=time.time,
            tiers=tiers,
            checks=checks,
            tier_checks=tier_checks,
            vocab_size=vocab_size,
        )
        self.recomputed_prompts = 0
        """Number of prompts that were computed here although a prefill worker was to compute them."""
        self._recomputes = load_failure_of(config) is LoadFailure.RECOMPUTE

    def _digest_held(self, group: int, held: OfferedGroup, interval: Interval) -> bytes:
        return self._store.slots_digest(group, held.pages, interval)

    # ---- requests ----------------------------------------------------------------------------------

    @property
    def facts(self) -> WorkerFacts:
        kv = self._scheduler.kv
        return WorkerFacts(
            connector=self.config.kv_connector,
            role=self.config.kv_role,
            load_failure_policy=self.config.kv_load_failure_policy,
            endpoint=self.link.endpoint,
            engine=self.engine,
            protocol=PROTOCOL,
            layout_digest=layout_digest(kv.layout, kv.config.identity).hex(),
            lease_s=self.config.lease_s,
        )

    @property
    def computes_prompts(self) -> bool:
        """Whether a prompt without a prefill worker's KV is computed here."""
        return self.config.kv_role != "kv_consumer" or load_failure_of(self.config) is LoadFailure.RECOMPUTE

    def open_ticket(self, request_id: str, ticket: str) -> Ticket:
        """Returns what a caller's ticket says, or refuses it: it was not made by a worker of this cluster."""
        if not self.config.fetches:
            raise RequestError(
                f"request {request_id!r} is to start from another worker's KV, but this worker only computes prompts "
                "(kv_role kv_producer); send it to a decode worker"
            )
        return self._key.open(ticket)

    def fetch(self, sequence: str, ticket: Ticket, tokens: Sequence[int], salt: str, *, takes_token: bool) -> None:
        self.driver.fetch(sequence, ticket, binding=prompt_binding(tokens, salt=salt), takes_token=takes_token)

    def note_plain_prompt(self, *, had_no_room: bool) -> None:
        """Count a prompt without a ticket, if a prefill worker was to compute it: that worker had no room to hold the
        KV, or this one leaves prompts to others."""
        self.recomputed_prompts += self.exchanges_kv and (had_no_room or not self.config.hands_over)

    def decline(self, ticket: Ticket, tokens: Sequence[int], salt: str) -> None:
        """Let a prefill worker know that its KV is not needed."""
        self.recomputed_prompts += 1
        self.driver.decline(ticket, binding=prompt_binding(tokens, salt=salt))

    def hand_over(self, sequence: str, prompt: Sequence[int], salt: str, first: FirstToken) -> str | None:
        """Returns the ticket for a prompt that was computed; None if too much is held for others already."""
        return self.driver.hand_over(sequence, binding=prompt_binding(prompt, salt=salt), first=first)

    # ---- steps -------------------------------------------------------------------------------------

    def advance(self) -> list[Fetched]:
        fetched = self.driver.advance()
        for answer in fetched:
            if answer.offer is None:
                self.recomputed_prompts += self._recomputes
                logger.warning("no KV came from %s for request %s: %s", answer.peer, answer.sequence, answer.reason)
        return fetched

    def start_loads(self) -> None:
        self.driver.start_loads()

    @property
    def asks_tiers(self) -> bool:
        """Whether a prompt is looked up in a tier that has to be asked."""
        return self.driver.offloading.asks

    def enter(self, sequence: str) -> None:
        """Look up a new request's prompt in the tiers."""
        if self.tiers:
            self.driver.offloading.enter(sequence)

    def store(self) -> None:
        """Have the tiers take over what the last step has added to the prefix cache."""
        if self.tiers:
            self.driver.offloading.store()

    def take_settled(self) -> list[Settled]:
        settled = self.driver.take_settled()
        for hand_off in settled:
            if hand_off.reason:
                self.recomputed_prompts += self._recomputes and not hand_off.transferred_tokens
                logger.warning(
                    "not all KV came from %s for request %s: %s", hand_off.peer, hand_off.sequence, hand_off.reason
                )
        return settled

    # ---- waiting -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """End a wait of the engine's thread. May be called on any thread."""
        with self._wake_lock:
            if self._is_open:
                os.eventfd_write(self._wake, 1)

    @property
    def files(self) -> tuple[int, ...]:
        """Descriptors that are readable when `advance` has something to do."""
        ends = (self.link.fileno(), *(tier.tier.fileno() for tier in self.tiers))
        return (*(end for end in ends if end >= 0), self._wake)

    @property
    def limit_s(self) -> float | None:
        """Seconds after which `advance` has something to do at the latest; None if never."""
        deadline_s = self.driver.next_deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())

    def woken(self) -> None:
        """Note that a wait has ended."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass

    def wait(self, limit_s: float) -> None:
        """Sleep until `advance` has something to do, at most this long."""
        own_limit_s = self.limit_s
        select.select(self.files, [], [], limit_s if own_limit_s is None else min(limit_s, own_limit_s))
        self.woken()

    def close(self) -> None:
        self.driver.close()
        with self._wake_lock:
            if self._is_open:
                self._is_open = False
                os.close(self._wake)


def settings_digest(params: SamplingParams) -> bytes:
    """Returns a digest of the settings that a first token and its log-probabilities depend on.

    Proxies change settings on the way: some ask the prefill worker for at least one token, where the client did not. A
    decode worker takes only a first token that was drawn with its own settings, and otherwise draws one itself.
    """
    hides_ends = params.min_tokens > 0
    settings = (
        None if params.greedy else (params.temperature, params.top_p, params.top_k, params.min_p, params.seed),
        (params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
        sorted((params.logit_bias or {}).items()),
        None if params.allowed_token_ids is None else sorted(params.allowed_token_ids),
        hides_ends and sorted(params.stop_tokens),
        params.logprobs,
        None if params.grammar is None else (params.grammar.kind.value, params.grammar.text),
    )
    return blake2b(repr(settings).encode(), digest_size=SETTINGS_BYTES).digest()


def make_link(config: KVTransferConfig, memory: MemoryMap, desk: Desk, key: ClusterKey, *, engine: str) -> Link:
    if config.kv_connector == "local":
        from outrider.transfer.links.local import LocalLink

        return LocalLink(memory, desk, engine=engine)
    from outrider.transfer.links.nixl import NixlLink

    return NixlLink(
        memory, desk, key, host=config.kv_ip, port=config.kv_port, engine=engine, transport=config.kv_transport
    )


class SlotChecks:
    """Tells the sanitizer about slots that arrive, and compares their bytes with the sender's at level `bytes`."""

    def __init__(self, sanitizer: Sanitizer, scheduler: Scheduler, store: PageStore, compares_bytes: bool) -> None:
        self._sanitizer = sanitizer
        self._kv = scheduler.kv
        self._store = store
        self._compares_bytes = compares_bytes

    @property
    def compares_bytes(self) -> bool:
        return self._compares_bytes

    def digest(self, sequence: str, load: Load) -> bytes:
        pages = self._kv.sequences[sequence].groups[load.group].pages
        return self._store.slots_digest(load.group, pages, load.interval)

    def arrived(self, sequence: str, load: Load, runs: Sequence[SlotRun], sender: str) -> None:
        steps = self._sanitizer.steps
        for run in runs:
            # The ticket is bound to this very prompt, so the sender's slots have the identity of ours.
            ids = steps.identities(sequence, load.group, Interval(run.start, run.start + run.slots))
            states = bytes([DURABLE]) * len(ids)
            steps.landed(sequence, load.group, run.destination_page, run.destination_offset, ids, states, sender)

    def differs(self, sequence: str, load: Load, sender: str) -> None:
        self._sanitizer.transfer_differs(sequence, load.group, load.interval, sender)
