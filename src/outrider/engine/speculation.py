"""Counts of drafts and of those accepted, per request and per engine. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationCounts:
    """Drafts of any number of verifications."""

    drafts: int = 0
    """Number of verifications: times that the target checked the drafts of a request."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """How often the draft at each place was accepted."""

    def count(self, proposed: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        if proposed > len(self.accepted_at):
            self.accepted_at.extend([0] * (proposed - len(self.accepted_at)))
        for place in range(accepted):
            self.accepted_at[place] += 1

    def clear(self) -> None:
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self.accepted_at.clear()

    def add(self, other: SpeculationCounts) -> None:
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.accepted_at.extend([0] * (len(other.accepted_at) - len(self.accepted_at)))
        for place, number in enumerate(other.accepted_at):
            self.accepted_at[place] += number

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of tokens per verification, including the one that the target adds to the accepted drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0
