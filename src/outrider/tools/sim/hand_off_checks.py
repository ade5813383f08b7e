"""I10: what nothing disturbs succeeds. The world reports how hand-offs go, and why they failed if they did."""

from __future__ import annotations

from collections import Counter

from outrider.errors import InvariantViolation
from outrider.scheduler import LoadFailure, ScheduledRequest
from outrider.tools.sim.network import LeaseRecord, Network
from outrider.tools.sim.scenario import Scenario
from outrider.tools.sim.worker import CLUSTER_KEY, Worker

REFUSALS = {
    "there is no such lease": "ticket_of_ended_lease",
    "another worker has claimed": "ticket_used_twice",
    "in use by another request": "ticket_used_twice",
    "for another prompt": "ticket_not_bound_to_prompt",
    "has expired": "ticket_expired",
    "comes from another model": "peer_refused",
    "target's KV or the protocol differs": "peer_refused",
    "target layout differs": "peer_refused",
    "no pages became free in time": "waited_too_long_for_pages",
}
"""Reasons of the driver for doing without a peer's KV that are no fault, and what they are counted as."""


class HandOffChecks:
    def __init__(self, scenario: Scenario, network: Network, counts: Counter[str]) -> None:
        self._scenario = scenario
        self._network = network
        self._counts = counts

    def granted(self, worker: Worker, sequence: str, sealed: str) -> None:
        """Note a lease that a prefill worker has promised."""
        ticket = CLUSTER_KEY.open(sealed)
        self._network.leases[ticket.lease] = LeaseRecord(sequence, worker.engine)

    def not_fetched(self, worker: Worker, sequence: str, reason: str) -> None:
        """Count why no KV comes for a request, and check that there is a reason."""
        for says, kind in REFUSALS.items():
            self._counts[kind] += says in reason
        self._counts["recomputed"] += LoadFailure(self._scenario.load_failure) is LoadFailure.RECOMPUTE
        if any(says in reason for says in REFUSALS):
            worker.started.add(sequence)
        else:
            self.settled(worker, sequence, reason)

    def settled(self, worker: Worker, sequence: str, reason: str) -> None:
        """A hand-off that nothing has disturbed brings all KV."""
        self._counts["hand_off_settled"] += not reason
        ticket = worker.tickets.get(sequence)
        if not reason or ticket is None:
            return
        self._counts["hand_off_incomplete"] += 1
        ought = self._network.ought_to_succeed(ticket.lease, worker.engine, ticket.endpoint)
        if ought and sequence not in worker.excused:
            raise InvariantViolation("I10", f"the hand-off of {sequence} failed without need: {reason}")

    def row_ran(self, worker: Worker, row: ScheduledRequest) -> None:
        """A request whose target KV came whole does not compute its prompt again, whatever became of the rest."""
        name, ticket = row.sequence_id, worker.tickets.get(row.sequence_id)
        request = worker.scheduler.requests.get(name)
        if ticket is None or name in worker.started:
            return
        worker.started.add(name)
        if all(group.window == 1 for group in self._scenario.target):
            return  # nothing needs to be sent, and the prompt is computed again
        ought = self._network.ought_to_succeed(ticket.lease, worker.engine, ticket.endpoint, target_only=True)
        if request is None or request.preemptions or not ought or name in worker.excused:
            return
        own_rows = 1 if request.spec.n > 1 else 0
        if row.start < request.prompt_len - own_rows:
            raise InvariantViolation(
                "I10", f"{name} computes its prompt from {row.start} although all of the target's KV came"
            )
