"""What can happen to messages, reads and loads, drawn from the scenario's seed and their names."""

from __future__ import annotations

from typing import NamedTuple

from outrider.tools.sim.oracle import chance
from outrider.tools.sim.scenario import Scenario


class LoadFate(NamedTuple):
    """A load from a tier."""

    delay: int
    failed: bool = False


class ReadFate(NamedTuple):
    """A read from a peer, in up to three parts."""

    delays: tuple[int, ...]
    """Ticks from the start until each part lands."""
    kind: str = ""
    """Nothing, "failed" (it ends before its last part), "hung" (it never ends), "late", or "damaged" (a slot is changed
    on the way)."""


class MessageFate(NamedTuple):
    delays: tuple[int, ...]
    """Ticks until each copy of the message arrives; none if it is lost."""
    kind: str = ""
    """Nothing, "lost", "duplicated" or "late"."""


def load_fate(scenario: Scenario, *name: object) -> LoadFate:
    """Most loads are quick; some are late, past every limit, and some fail."""
    seed, request = scenario.seed, name[0]
    # All loads of one request may be so quick that they land before the step that copies for it has run.
    quick = chance(seed, "quick", request) < 0.25
    delay = 0 if quick else 1 + int(6 * chance(seed, "delay", *name))
    if chance(seed, "fault", *name) >= scenario.transfer_faults:
        return LoadFate(delay)
    choice = int(4 * chance(seed, "kind", *name))
    if choice < 2:
        return LoadFate(delay, failed=True)
    return LoadFate(delay + (12 if choice == 2 else 34 + int(20 * chance(seed, "late", *name))))


def read_fate(scenario: Scenario, *name: object) -> ReadFate:
    """Most reads are quick. Others fail, are late (past the reader's limit or the lease), never end or are damaged."""
    seed, request = scenario.seed, name[0]
    quick = chance(seed, "quick", request) < 0.25
    ends = [0 if quick else 1 + int(6 * chance(seed, "delay", part, *name)) for part in range(3)]
    delays = tuple(sorted(ends))
    if chance(seed, "fault", *name) >= scenario.transfer_faults / 2:
        return ReadFate(delays)
    choice = int(6 * chance(seed, "kind", *name))
    if choice == 0:
        return ReadFate(delays, "failed")
    if choice == 1:
        return ReadFate(delays, "hung")
    if choice == 2 and scenario.compare_bytes:
        return ReadFate(delays, "damaged")
    later = (12, 30, 40, 90)[choice - 2] + int(10 * chance(seed, "late", *name))
    return ReadFate((*delays[:-1], delays[-1] + later), "late")


def message_fate(scenario: Scenario, *name: object) -> MessageFate:
    seed = scenario.seed
    delay = int(3 * chance(seed, "message", *name))
    if chance(seed, "message fault", *name) >= scenario.message_faults:
        return MessageFate((delay,))
    choice = chance(seed, "message kind", *name)
    if choice < 0.4:
        return MessageFate((), "lost")
    later = delay + 1 + int(8 * chance(seed, "message late", *name))
    if choice < 0.7:
        return MessageFate((delay, later), "duplicated")
    # Some arrive before the next one, some after every limit.
    return MessageFate((later * (1 if choice < 0.85 else 12),), "late")
