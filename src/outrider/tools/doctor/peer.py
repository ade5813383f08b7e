"""Is a prefill worker of any use to the engine that would run here?

    GET /kv_transfer ─▶ endpoint ─▶ Hello ─▶ Welcome | Refused ─▶ signatures ─▶ memory ─▶ round trip ─▶ reads

The handshake is the real one, and so are the reads: pages of the peer are copied into memory of this process, as a
decode worker would copy them into its cache. Nothing is written that the peer uses, and no lease is claimed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from outrider.config import KVTransferConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, TransferError
from outrider.kv.layout import KVLayout
from outrider.kv.prefix import CacheIdentity
from outrider.tools.bench.transfer_pages import PagedMemory, Tables, prompt_runs
from outrider.tools.doctor.findings import Finding, Status, bytes_text
from outrider.tools.doctor.peer_address import (
    PeerFacts,
    Unusable,
    ask_http,
    check_endpoint,
    check_reach,
    endpoint_parts,
)
from outrider.tools.wording import counted
from outrider.transfer.link import Failed, GroupRead, Landed, Received
from outrider.transfer.links.machine import memory_obstacle
from outrider.transfer.links.memory import MemoryMap
from outrider.transfer.links.nixl import Introduction, NixlLink
from outrider.transfer.links.nixl_agent import load_nixl
from outrider.transfer.messages import PROTOCOL, Hello, Message, Refused, Renew, Welcome
from outrider.transfer.offers import GroupSignature, layout_digest, shared_groups, signatures
from outrider.transfer.tickets import ClusterKey

READ_BYTES = 64 << 20
READS = 5
GREETINGS = 20
LABEL = re.compile(r"weights (?P<weights>.*), dtype (?P<dtype>.*), layout (?P<layout>.*), (?P<part>part \d+ of \d+)")
"""What `CacheIdentity.label` is made of."""
SHOWN_CHARACTERS = 40
ADVICE = {
    "weights": "load the same model files on both workers",
    "dtype": "give both workers the same --dtype, and --expand-weights on both or on neither",
    "layout": "run the same version on both workers",
    "part": "give both workers the same part of the model",
}
SLOW_LINES = {"pages": "give both workers the same --block-size: pages of other lengths are moved in small pieces"}


@dataclass(frozen=True, kw_only=True)
class OwnSide:
    """What the engine that would run here needs, whether or not its weights are still in memory."""

    layout: KVLayout
    identity: CacheIdentity
    shape: MemoryMap
    transfer: KVTransferConfig

    @classmethod
    def of(cls, engine: Engine, transfer: KVTransferConfig) -> OwnSide:
        """Raises ConfigError if the engine's KV lies where nothing can be moved to."""
        kv = engine.scheduler.kv
        return cls(
            layout=kv.layout, identity=kv.config.identity, shape=engine.runner.store.memory_map(), transfer=transfer
        )

    @property
    def signatures(self) -> tuple[GroupSignature, ...]:
        return signatures(self.layout, self.identity)

    @property
    def key(self) -> ClusterKey:
        assert self.transfer.cluster_key is not None
        return ClusterKey(self.transfer.cluster_key)


@dataclass(kw_only=True)
class PeerReport:
    address: str
    findings: list[Finding] = field(default_factory=list)
    usable: str = "none"
    """Whose KV this engine could fetch: all, target or none."""
    transport: str | None = None
    round_trip_ms: float | None = None
    gb_per_s: float | None = None

    @property
    def healthy(self) -> bool:
        return self.usable != "none" and all(finding.status is not Status.PROBLEM for finding in self.findings)

    @property
    def verdict(self) -> str:
        if not self.healthy:
            return "of no use to this engine"
        if self.usable == "target":
            return "of use: the target's KV; the drafter starts without what it knew of the prompt"
        return "of use: all KV"

    def as_json(self) -> dict[str, Any]:
        return {
            "peer": self.address,
            "healthy": self.healthy,
            "usable": self.usable if self.healthy else "none",
            "transport": self.transport,
            "round_trip_ms": self.round_trip_ms,
            "gb_per_s": self.gb_per_s,
            "findings": [finding.as_json() for finding in self.findings],
        }


def examine_peer(address: str, own: OwnSide, *, api_key: str | None = None) -> PeerReport:
    """Asks the worker at a URL, or at the HOST:PORT of its endpoint, all that can be found out about it."""
    report = PeerReport(address=address)
    try:
        facts = None
        endpoint = address
        if address.startswith(("http://", "https://")):
            facts = ask_http(address, api_key)
            report.findings += _look_at_facts(facts)
            endpoint = facts.endpoint
            check_reach(address, endpoint)
        endpoint_parts(endpoint)
        try:
            load_nixl()
        except ConfigError as error:
            text = "it is needed to read from other workers, and cannot be used here"
            if facts is not None:
                same = facts.layout_digest == layout_digest(own.layout, own.identity).hex()
                verdict = "is like this engine's" if same else "differs from this engine's"
                text += f"; by its digest, the worker's target KV {verdict}"
            raise Unusable("NIXL", text, str(error)) from None
        check_endpoint(endpoint)
        _shake_hands(report, own, endpoint, facts)
    except Unusable as unusable:
        report.findings.append(unusable.finding)
    return report


def _look_at_facts(facts: PeerFacts) -> list[Finding]:
    """Raises Unusable for a worker from which nothing can be fetched, whatever it has."""
    if facts.connector != "nixl":
        raise Unusable(
            "connector",
            f"the worker's kv_connector is {facts.connector}, which other processes cannot reach",
            "start it with kv_connector nixl",
        )
    if facts.role == "kv_consumer":
        raise Unusable(
            "role",
            "the worker is a decode worker (kv_role kv_consumer), and hands no KV over",
            "name a prefill worker, or start it as kv_producer or kv_both",
        )
    if facts.protocol != PROTOCOL:
        raise Unusable(
            "protocol",
            f"the worker speaks version {facts.protocol} of the protocol, this one version {PROTOCOL}",
            "run the same version of Outrider on both",
        )
    return [Finding("worker", f"{facts.role} over {facts.connector}, engine {facts.engine_id} at {facts.endpoint}")]


class _Conversation:
    """A link of this process, with pages of its own to read into, and one peer."""

    def __init__(self, own: OwnSide, peer: str) -> None:
        self.peer = peer
        self._own = own
        self._reader = f"doctor {secrets.token_hex(4)}"
        tokens = max(1, READ_BYTES // sum(group.slot_bytes for group in own.layout.groups))
        self.scratch = PagedMemory(own.shape, num_tokens=tokens, seed=0)
        transfer = own.transfer
        try:
            self.link = NixlLink(
                self.scratch.map, None, own.key, host=transfer.kv_ip, port=0, engine=self._reader,
                transport=transfer.kv_transport,
            )  # fmt: skip
        except ConfigError as error:
            raise Unusable(
                "this side", str(error), "correct --kv-transfer-config, as `outrider serve` would need it"
            ) from None

    def greet(self) -> Message | None:
        """Returns the peer's answer to a greeting; None if none comes in time."""
        own = self._own
        self.link.send(self.peer, Hello(digest=layout_digest(own.layout, own.identity), reader=self._reader))
        limit_s = perf_counter() + own.transfer.answer_limit_s
        while (left_s := limit_s - perf_counter()) > 0:
            self.link.wait(left_s)
            for event in self.link.poll():
                if isinstance(event, Received) and isinstance(event.message, Welcome | Refused):
                    return event.message
        return None

    def read(self, reads: Sequence[GroupRead]) -> float:
        """Returns the seconds that it takes to read from the peer into the scratch pages."""
        # Any question lets the peer expect reads.
        self.link.send(self.peer, Renew(leases=[], reader=self._reader))
        started = perf_counter()
        limit_s = started + self._own.transfer.read_limit_s
        waiting = {self.link.read(self.peer, each) for each in reads}
        while waiting and (left_s := limit_s - perf_counter()) > 0:
            self.link.wait(left_s)
            for event in self.link.poll():
                if isinstance(event, Failed):
                    raise TransferError(event.reason)
                if isinstance(event, Landed):
                    waiting.discard(event.transfer)
        if waiting:
            raise TransferError(f"no bytes have come within {self._own.transfer.read_limit_s:g} s")
        return perf_counter() - started


def _shake_hands(report: PeerReport, own: OwnSide, endpoint: str, facts: PeerFacts | None) -> None:
    talk = _Conversation(own, endpoint)
    try:
        answer = talk.greet()
        if answer is None:
            # A worker that was stopped after the first look at its endpoint does not answer either.
            check_endpoint(endpoint)
            raise Unusable(
                "cluster key",
                f"{endpoint} takes connections, but does not answer under this cluster key: it has another one",
                "give both workers the same --cluster-key: @FILE, with one line",
            )
        if isinstance(answer, Refused):
            _explain_refusal(report, own, answer)
            return
        assert isinstance(answer, Welcome)
        _look_at_engine(report, answer, facts)
        theirs = tuple(GroupSignature.of(signature) for signature in answer.signatures)
        try:
            shared = shared_groups(own.layout, own.identity, theirs)
            talk.link.meet(endpoint, answer.introduction)
        except TransferError as error:
            raise Unusable("handshake", str(error), "see the two workers' settings") from None
        _look_at_groups(report, own, theirs, shared)
        introduction = msgspec.msgpack.decode(answer.introduction, type=Introduction)
        _look_at_transport(report, own, introduction)
        _measure(report, own, talk, introduction.memory, theirs, shared)
    finally:
        talk.link.close()


def _look_at_engine(report: PeerReport, welcome: Welcome, facts: PeerFacts | None) -> None:
    if facts is not None and facts.engine_id != welcome.engine:
        report.findings.append(
            Finding(
                "engine",
                f"the route names engine {facts.engine_id}, but {welcome.engine} answers at its endpoint",
                Status.NOTE,
                "ask again, in case the engine was being replaced; otherwise two workers name the same endpoint",
            )
        )


def _explain_refusal(report: PeerReport, own: OwnSide, refused: Refused) -> None:
    """Adds a finding for each thing that differs."""
    theirs = tuple(GroupSignature.of(signature) for signature in refused.signatures)
    findings = _differences(own, theirs)
    if not theirs:
        findings = [Finding("handshake", f"refused: {refused.reason}", Status.PROBLEM)]
    elif not findings:
        text = "the target's KV is the same, so the worker speaks another version of the protocol"
        findings = [Finding("protocol", text, Status.PROBLEM, "run the same version of Outrider on both")]
    report.findings += findings


def _differences(own: OwnSide, theirs: Sequence[GroupSignature]) -> list[Finding]:
    """Returns what keeps the peer's target KV from being this engine's."""
    if not theirs:
        return []
    found: list[Finding] = []
    here, there = (LABEL.fullmatch(label) for label in (own.identity.label, theirs[0].identity))
    if own.identity.label != theirs[0].identity and here is not None and there is not None:
        found += [
            Finding(name, f"here {_short(here[name])}, there {_short(there[name])}", Status.PROBLEM, ADVICE[name])
            for name in LABEL.groupindex
            if here[name] != there[name]
        ]
    by_name = {signature.name: signature for signature in theirs}
    for signature in own.signatures[: own.layout.num_target]:
        other = by_name.get(signature.name)
        advice = "run the same model on both workers"
        if other is None:
            names = ", ".join(by_name)
            text = f"the worker has no group {signature.name}, only {names}"
            found.append(Finding("layers", text, Status.PROBLEM, advice))
        elif (other.kind, other.slot_bytes) != (signature.kind, signature.slot_bytes):
            text = (
                f"a token takes {bytes_text(signature.slot_bytes)} ({signature.kind}) in group {signature.name} here, "
                f"{bytes_text(other.slot_bytes)} ({other.kind}) there"
            )
            found.append(Finding("layers", text, Status.PROBLEM, f"{advice}, with the same --dtype"))
    return found


def _short(text: str) -> str:
    text = text.strip("'")
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _look_at_groups(report: PeerReport, own: OwnSide, theirs: Sequence[GroupSignature], shared: frozenset[int]) -> None:
    target = own.layout.num_target
    report.findings.append(Finding("target", f"the same weights, dtype and layout, in {counted(target, 'group')}"))
    drafts = own.signatures[target:]
    report.usable = "all"
    if not drafts:
        others = " (the worker's drafter is of no concern)" if len(theirs) > target else ""
        report.findings.append(Finding("drafter", f"this engine's needs no KV{others}"))
    elif len(shared) == len(own.layout.groups):
        report.findings.append(Finding("drafter", f"the same, in {counted(len(drafts), 'group')}"))
    else:
        report.usable = "target"
        there = "another one" if any(signature.owner != "target" for signature in theirs) else "none with KV"
        report.findings.append(
            Finding(
                "drafter",
                f"the worker runs {there}: only the target's KV would move",
                Status.NOTE,
                "give both workers the same --speculative-config, for as many accepted drafts as a single worker has",
            )
        )


def _look_at_transport(report: PeerReport, own: OwnSide, introduction: Introduction) -> None:
    chosen = own.transfer.kv_transport
    obstacle = memory_obstacle(introduction.probe)
    if chosen != "tcp" and obstacle is None:
        report.transport = "cma"
        report.findings.append(Finding("transport", "cma: both run on one machine, and memory is copied directly"))
        return
    report.transport = "tcp"
    if chosen == "tcp":
        report.findings.append(Finding("transport", "tcp, as kv_transport says"))
    elif obstacle is not None and "another machine" in obstacle:
        report.findings.append(Finding("transport", f"tcp: {obstacle}"))
    else:
        report.findings.append(
            Finding("transport", f"tcp, although both run on one machine: {obstacle}", Status.NOTE, "cma is faster")
        )


def _measure(
    report: PeerReport,
    own: OwnSide,
    talk: _Conversation,
    memory: MemoryMap,
    theirs: Sequence[GroupSignature],
    shared: frozenset[int],
) -> None:
    times = []
    for _ in range(GREETINGS):
        started = perf_counter()
        if talk.greet() is None:
            raise Unusable("round trip", "the worker has stopped answering", "see its log, and ask again")
        times.append(perf_counter() - started)
    report.round_trip_ms = 1000 * median(times)
    report.findings.append(Finding("round trip", f"{report.round_trip_ms:.2f} ms for a control message"))
    reads, num_bytes = _reads(own, talk, memory, theirs, shared)
    sizes = {(own.shape.groups[read.group].page_tokens, memory.groups[read.remote_group].page_tokens) for read in reads}
    uneven = [pair for pair in sizes if pair[0] != pair[1]]
    for here, there in uneven:
        report.findings.append(Finding("pages", f"{here} tokens here, {there} there", Status.NOTE, SLOW_LINES["pages"]))
    try:
        # The first one connects.
        talk.read(reads)
        report.gb_per_s = num_bytes / median(talk.read(reads) for _ in range(READS)) / 1e9
    except TransferError as error:
        raise Unusable(
            "reads",
            f"control messages come through, but KV does not: {error}",
            "between machines, UCX needs ports of its own beside kv_port: let all ports between the workers through",
        ) from None
    rate = f"{report.gb_per_s:.2f} GB/s, {bytes_text(num_bytes)} at a time"
    report.findings.append(Finding("reads", f"{rate} over {report.transport}"))


def _reads(
    own: OwnSide,
    talk: _Conversation,
    memory: MemoryMap,
    theirs: Sequence[GroupSignature],
    shared: frozenset[int],
) -> tuple[list[GroupRead], int]:
    """Returns reads of as many of the peer's pages as fit into the scratch pages, and their bytes."""
    groups = sorted(shared)
    remote = [theirs.index(own.signatures[group]) for group in groups]
    there = MemoryMap(arenas=memory.arenas, groups=[memory.groups[each] for each in remote])
    here = MemoryMap(arenas=talk.scratch.map.arenas, groups=[talk.scratch.map.groups[group] for group in groups])
    # The peer's pages hold whatever they hold; page 0 and those after it exist in any case.
    tokens = min(
        talk.scratch.num_tokens,
        *(memory.arenas[group.arena].num_pages * group.page_tokens for group in there.groups),
    )
    source_tables: Tables = [range(memory.arenas[group.arena].num_pages) for group in there.groups]
    tables = [talk.scratch.tables[group] for group in groups]
    runs = prompt_runs(there, source_tables, here, tables, tokens)
    reads = [GroupRead(group, far, run) for group, far, run in zip(groups, remote, runs, strict=True)]
    return reads, tokens * sum(own.layout.groups[group].slot_bytes for group in groups)
