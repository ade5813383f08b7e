"""Settings of the scheduler, resolved once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number


class Role(Enum):
    """What a worker does; explicit, never guessed from traffic."""

    BOTH = "both"
    PREFILL = "prefill"
    """Computes prompts, feeds the drafter, proposes nothing, and keeps the KV for a decode worker."""
    DECODE = "decode"
    """Starts from KV that a prefill worker hands over."""


class LoadFailure(Enum):
    """What becomes of a request whose KV could not be loaded. Never wrong text."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    """Rows of one step: prefill, verify, tap, catch-up and drafting rows together."""
    max_chunk_tokens: int = 2048
    role: Role = Role.BOTH
    step_in_flight: bool = False
    protect_after_preemptions: int = 3
    load_failure: LoadFailure = LoadFailure.RECOMPUTE

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_chunk_tokens",
            "protect_after_preemptions",
        ):
            whole_number(getattr(self, name), name, at_least=1)
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be larger than max_num_seqs "
                f"({self.max_num_seqs}): each running request needs one row a step, and a prompt one more"
            )
