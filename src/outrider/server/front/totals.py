"""Token usage and speculation statistics of a client's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.engine.speculation import SpeculationCounts
from outrider.server.messages import Delta, Ending, Submit


class Totals:
    """Sums over all engine requests of one client request."""

    def __init__(self, orders: Sequence[Submit]) -> None:
        self._given = orders
        self.prompt_tokens = sum(len(order.prompt_token_ids) for order in orders)
        self.completion_tokens = 0
        self.endings: list[Ending] = []

    def take(self, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        if delta.ending is not None:
            self.endings.append(delta.ending)

    @property
    def complete(self) -> bool:
        """Whether all engine requests have ended."""
        return len(self.endings) == len(self._given)

    @property
    def cached_tokens(self) -> int:
        return sum(ending.cached_tokens for ending in self.endings)

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, **self._transferred()},
        }

    def metrics(self) -> dict[str, Any]:
        firsts = [each.first_token_s - each.arrival_s for each in self.endings if each.first_token_s is not None]
        queued = [each.scheduled_s - each.arrival_s for each in self.endings if each.scheduled_s is not None]
        return {
            "time_to_first_token_s": min(firsts, default=None),
            "time_in_queue_s": min(queued, default=None),
            "engine_time_s": max((each.finished_s - each.arrival_s for each in self.endings), default=None),
            "steps": sum(each.steps for each in self.endings),
            "speculative_decoding": self._speculation(),
            **self._transfers(),
        }

    def _transferred(self) -> dict[str, int]:
        """Returns the number of prompt tokens that came from prefill workers, for requests that were to get any."""
        if all(order.ticket is None for order in self._given):
            return {}
        return {"transferred_tokens": sum(ending.transferred_tokens for ending in self.endings)}

    def _transfers(self) -> dict[str, Any]:
        moved = [ending for ending in self.endings if ending.transfer is not None]
        if not moved:
            return {}
        figures = [ending.transfer for ending in moved if ending.transfer is not None]
        return {
            "kv_transfer": {
                "queued_s": max(each.queued_s for each in figures),
                "read_s": max(each.read_s for each in figures),
                "confirmed_s": max(each.confirmed_s for each in figures),
                "bytes": sum(each.bytes for each in figures),
                "tokens": sum(ending.transferred_tokens for ending in moved),
            }
        }

    def _speculation(self) -> dict[str, Any]:
        counts = SpeculationCounts()
        for ending in self.endings:
            counts.add(ending.speculation)
        return {
            "drafts": counts.drafts,
            "draft_tokens": counts.draft_tokens,
            "accepted_tokens": counts.accepted_tokens,
            "acceptance_length": counts.mean_acceptance_length,
            "acceptance_rate": counts.acceptance_rate,
            "accepted_per_position": counts.accepted_at,
        }
