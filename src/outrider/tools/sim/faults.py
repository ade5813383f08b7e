"""What can happen to a transfer, drawn from the scenario's seed and the transfer's name."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.tools.sim.oracle import chance
from outrider.tools.sim.scenario import Scenario


@dataclass(frozen=True)
class TransferFate:
    delay: int
    failed: bool = False
    duplicated: bool = False
    kinds: tuple[str, ...] = ()


def transfer_fate(scenario: Scenario, request: str, name: str, *, from_tier: bool = False) -> TransferFate:
    """Most transfers are quick; some are late (past a deadline or a lease), fail, or report twice."""
    seed = scenario.seed
    # All transfers of one request may be so quick that they land before the step that copies for it has run.
    quick = chance(seed, "quick", request) < 0.25
    delay = 0 if quick else 1 + int(6 * chance(seed, "delay", request, name))
    if chance(seed, "fault", request, name) >= scenario.transfer_faults:
        return TransferFate(delay)
    choice = int(4 * chance(seed, "kind", request, name))
    if choice == 0 or (from_tier and choice == 1):  # a tier never reports twice
        return TransferFate(delay, failed=True, kinds=("transfer_failed",))
    if choice == 1:
        return TransferFate(delay, duplicated=True, kinds=("transfer_duplicated",))
    if choice == 2:
        return TransferFate(delay + 12, kinds=("transfer_delayed",))
    return TransferFate(delay + 34 + int(20 * chance(seed, "late", request, name)), kinds=("transfer_delayed",))
