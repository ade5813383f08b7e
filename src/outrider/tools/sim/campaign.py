"""Campaigns: many scenarios of one seed, on all cores, added up."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import Pool
from typing import Any

from outrider.tools.sim.drawing import draw
from outrider.tools.sim.scenario import PHASE_FAULTS, Scenario, phase_fault
from outrider.tools.sim.world import Failure, Result, World

CHUNK = 20

SITUATIONS = (
    "abort",
    "adapter_hit",
    "announcement_withdrawn",
    "cache_reset",
    "chunking",
    "damage_noticed",
    "draft_groups_dropped",
    "draft_window_load_failed",
    "drafter_catching_up",
    "drafts_carried",
    "end_kept",
    "fenced",
    "fork",
    "hand_off_incomplete",
    "hand_off_settled",
    "handed_over",
    "handed_over_without_ticket",
    "host_tier_page",
    "interval_imported",
    "landed_in_quarantine",
    "lease_expired",
    "looked_up_in_own_text",
    "looked_up_in_shared_text",
    "media_hit",
    "message_duplicated",
    "message_late",
    "message_lost",
    "message_reordered",
    "message_to_dead_worker",
    "more_drafts_than_asked_for",
    "not_held",
    "page_copy",
    "page_shortage",
    "peer_refused",
    "peer_without_drafter",
    "plain_prompt",
    "plain_prompt_refused",
    "preemption",
    "preemption_while_loading",
    "read_damaged",
    "read_failed",
    "read_hung",
    "read_late",
    "read_of_dead_worker_hung",
    "recomputed",
    "refused",
    "remote_tier_page",
    "request_failed",
    "resent",
    "shared_prefix_marked",
    "step_abandoned",
    "store_death",
    "ticket_brought_twice",
    "ticket_expired",
    "ticket_forged",
    "ticket_late",
    "ticket_not_bound_to_prompt",
    "ticket_of_another_prompt",
    "ticket_of_ended_lease",
    "ticket_used_twice",
    "tier_load",
    "tier_load_failed",
    "tier_load_late",
    "tier_look_up_late",
    "tier_value_damaged",
    "waited_too_long_for_pages",
    "worker_death",
    "worker_stopped",
)
PHASE_SITUATIONS = tuple(phase_fault(*fault) for fault in PHASE_FAULTS)
"""Which fault befell a hand-off in which phase."""


def run_scenario(scenario: Scenario) -> Result:
    """Run one scenario. One by one with ample pages, hits must equal those of a run without speculation."""
    result = World(scenario).run()
    if scenario.one_by_one and result.failure is None:
        plain = World(without_speculation(scenario)).run()
        if plain.hits != result.hits:
            result.hit_mismatches += 1
            result.failure = Failure(
                "hit_mismatch",
                "I9",
                f"hits with speculation {result.hits} differ from hits without {plain.hits}",
                result.steps,
            )
    return result


def without_speculation(scenario: Scenario) -> Scenario:
    requests = tuple(replace(request, k=0) for request in scenario.requests)
    return replace(scenario, archetype="nothing", draft=(), requests=requests)


@dataclass
class Tally:
    """What a campaign did and found. `faults` counts how often each situation was reached."""

    scenarios: int = 0
    steps: int = 0
    tokens: int = 0
    finished: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    faults: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys((*SITUATIONS, *PHASE_SITUATIONS), 0)))
    violations: int = 0
    wrong_outputs: int = 0
    leaked_pages: int = 0
    hit_mismatches: int = 0
    stuck: int = 0
    crashes: int = 0
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, index: int, result: Result) -> None:
        self.scenarios += 1
        self.steps += result.steps
        self.tokens += result.tokens
        self.finished += result.finished
        self.draft_tokens += result.drafts
        self.accepted_tokens += result.accepted
        self.faults.update(result.faults)
        self.leaked_pages += result.leaked_pages
        self.hit_mismatches += result.hit_mismatches
        if result.failure is not None:
            self.violations += result.failure.kind == "violation"
            self.wrong_outputs += result.failure.kind == "wrong_output"
            self.stuck += result.failure.kind == "stuck"
            self.crashes += result.failure.kind == "crash"
            self.failures.append((index, result.failure))

    def as_json(self) -> dict[str, Any]:
        return {
            "scenarios": self.scenarios,
            "steps": self.steps,
            "requests_finished": self.finished,
            "tokens": self.tokens,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "faults": dict(sorted(self.faults.items())),
            "violations": self.violations,
            "wrong_outputs": self.wrong_outputs,
            "leaked_pages": self.leaked_pages,
            "hit_mismatches": self.hit_mismatches,
            "stuck": self.stuck,
            "crashes": self.crashes,
            "seconds": round(self.seconds, 2),
            "steps_per_second": round(self.steps / self.seconds) if self.seconds else 0,
        }


def _run_chunk(chunk: tuple[int, int, int]) -> list[tuple[int, Result]]:
    seed, first, stop = chunk
    return [(index, run_scenario(draw(seed, index))) for index in range(first, stop)]


def run_campaign(
    seed: int, scenarios: int, *, processes: int = 0, progress: Callable[[int], None] | None = None
) -> Tally:
    """Run scenarios 0 .. scenarios-1 of a seed, in as many processes as there are cores if `processes` is 0."""
    tally = Tally()
    began = time.perf_counter()
    for index, result in _results(seed, scenarios, processes or os.cpu_count() or 1):
        tally.add(index, result)
        if progress is not None:
            progress(1)
    tally.failures.sort(key=lambda failure: failure[0])
    tally.seconds = time.perf_counter() - began
    return tally


def _results(seed: int, scenarios: int, processes: int) -> Iterator[tuple[int, Result]]:
    if processes == 1 or scenarios <= CHUNK:
        for index in range(scenarios):
            yield (index, run_scenario(draw(seed, index)))
        return
    chunks = [(seed, first, min(first + CHUNK, scenarios)) for first in range(0, scenarios, CHUNK)]
    # Leaving the block, by an interrupt too, ends the processes; they themselves leave interrupts to this one.
    with Pool(processes, initializer=_leave_interrupts) as pool:
        for results in pool.imap(_run_chunk, chunks):
            yield from results


def _leave_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
