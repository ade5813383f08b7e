"""Scenarios from traces: plain data from files that people edit, checked before they run."""

from __future__ import annotations

from collections import Counter
from math import isfinite

from outrider.errors import OutriderError, TraceError
from outrider.kv.archetypes import ARCHETYPES
from outrider.kv.retention import Retention
from outrider.scheduler import LoadFailure, Role
from outrider.scheduler.request import token_array
from outrider.tools.sim.plain import read
from outrider.tools.sim.scenario import (
    FIRST,
    OUTSIDE_FAULTS,
    PEER_DRAFTERS,
    PEER_ROLES,
    PHASES,
    SIDES,
    PeerDraw,
    RequestDraw,
    Scenario,
)

MOST_SLACK = 1000.0
"""Largest arena_slack: more pages would only cost memory."""


PROBABILITIES = (
    "acceptance",
    "held_share",
    "host_probability",
    "message_faults",
    "ticket_faults",
    "tier_probability",
    "transfer_faults",
)
MOST_SLOTS = 2_000_000
MOST_PAGE_TOKENS = 256


def read_scenario(data: object, where: str = "scenario") -> Scenario:
    """Read back Scenario.as_json(); refuses what it does not know, and what could not run."""
    scenario = read(Scenario, data, where)
    problem = _problem(scenario)
    if problem is not None:
        raise TraceError(f"{where}: {problem}")
    try:
        _build(scenario)
    except OutriderError as error:
        raise TraceError(f"{where} cannot run: {error}") from error
    return scenario


def _build(scenario: Scenario) -> None:
    """Build everything that a run will need; a contradiction raises its own error."""
    for request in scenario.requests:
        token_array(request.spec().prompt, f"request {request.id!r}")
    for worker in scenario.workers:
        layout = scenario.layout(worker)
        slots = sum(scenario.kv_config(layout, worker).arena_pages) * max(g.page_tokens for g in layout.groups)
        if slots > MOST_SLOTS:
            raise TraceError(f"it takes up to {slots} slots, and a simulation may have {MOST_SLOTS}; make it smaller")
    scenario.scheduler_config(Role.BOTH)
    for policy in (scenario.tier_retention, scenario.host_retention):
        Retention.of(policy)


def _problem(scenario: Scenario) -> str | None:
    """Returns the first problem that no constructor would notice."""
    for name in PROBABILITIES:
        if not 0 <= getattr(scenario, name) <= 1:
            return f"{name} must lie between 0 and 1, got {getattr(scenario, name)}"
    if not isfinite(scenario.arena_slack) or not 0 <= scenario.arena_slack <= MOST_SLACK:
        return f"arena_slack must lie between 0 and {MOST_SLACK:g}, got {scenario.arena_slack}"
    if scenario.archetype not in ARCHETYPES:
        return f"unknown archetype {scenario.archetype!r}; known: {', '.join(ARCHETYPES)}"
    if scenario.load_failure not in [policy.value for policy in LoadFailure]:
        known = ", ".join(policy.value for policy in LoadFailure)
        return f"unknown load_failure {scenario.load_failure!r}; known: {known}"
    large = [group.page_tokens for group in (*scenario.target, *scenario.draft) if group.page_tokens > MOST_PAGE_TOKENS]
    if large:
        return f"page_tokens may be at most {MOST_PAGE_TOKENS}, got {large[0]}"
    if scenario.vocabulary < 2:
        return f"vocabulary must be at least 2, so that a draft can be wrong, got {scenario.vocabulary}"
    return _peer_problem(scenario) or _request_problem(scenario.requests) or _fault_problem(scenario)


def _peer_problem(scenario: Scenario) -> str | None:
    if scenario.peers and not scenario.prefillers:
        return "no worker computes prompts for others; give a peer the role 'prefill', or leave the peers out"
    if scenario.first_prefills and not scenario.peers:
        return "first_prefills is set, but there are no peers; add one, or leave it out"
    for name, count in Counter(scenario.workers).items():
        if count > 1:
            return f"{count} workers have the name {name!r}; give each its own (the first is {FIRST!r})"
    for peer in scenario.peers:
        problem = _pages_problem(scenario, peer)
        if problem is not None:
            return f"peer {peer.name!r}: {problem}"
    return None


def _pages_problem(scenario: Scenario, peer: PeerDraw) -> str | None:
    if peer.role not in PEER_ROLES:
        return f"unknown role {peer.role!r}; known: {', '.join(PEER_ROLES)}"
    if peer.drafter not in PEER_DRAFTERS:
        return f"unknown drafter {peer.drafter!r}; known: {', '.join(PEER_DRAFTERS)}"
    for name, sizes, own in (
        ("target_pages", peer.target_pages, scenario.target),
        ("draft_pages", peer.draft_pages, scenario.draft),
    ):
        if len(sizes) != len(own):
            return f"{name} must give one page size for each of {len(own)} group(s), got {len(sizes)}"
        if not all(1 <= size <= MOST_PAGE_TOKENS for size in sizes):
            return f"{name} must be page sizes of at least 1 and at most {MOST_PAGE_TOKENS}, got {list(sizes)}"
    return None


def _request_problem(requests: tuple[RequestDraw, ...]) -> str | None:
    for name, count in Counter(request.id for request in requests).items():
        if count > 1:
            return f"{count} requests have the id {name!r}; give each its own"
        if "#" in name or "~" in name:
            return f"request id {name!r} holds a '#' or '~', which name forks and legs; choose another"
    late = [request.id for request in requests if request.at < 0]
    return f"request {late[0]!r} comes at a negative tick; use 0 or more" if late else None


def _fault_problem(scenario: Scenario) -> str | None:
    requests = [request.id for request in scenario.requests]
    for fault in scenario.faults:
        if fault.kind not in OUTSIDE_FAULTS:
            return f"unknown kind of fault {fault.kind!r}; known: {', '.join(OUTSIDE_FAULTS)}"
        if fault.phase and fault.phase not in PHASES:
            return f"unknown phase {fault.phase!r} of a fault; known: {', '.join(PHASES)}"
        if fault.side and fault.side not in SIDES:
            return f"unknown side {fault.side!r} of a fault; known: {', '.join(SIDES)}"
        if fault.phase and fault.kind != "abort" and not fault.side:
            return f"fault {fault.kind!r} waits for a phase; say which side it befalls: {', '.join(SIDES)}"
        targets = requests if fault.kind == "abort" or fault.phase else list(scenario.workers)
        if fault.target not in targets:
            return f"fault {fault.kind!r} names {fault.target!r}, which is not here; known: {', '.join(targets)}"
        if fault.at < 0:
            return f"fault {fault.kind!r} comes at a negative tick; use 0 or more"
    forks = [request.id for request in scenario.requests if request.n > 1]
    tiers = scenario.tier_probability or scenario.host_probability
    if scenario.one_by_one and (scenario.split or scenario.faults or tiers or forks):
        return "one_by_one compares hits with a run without drafts: leave peers, faults, tiers and forks out"
    return None
