"""Settings of the scheduler, resolved once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number
from outrider.kv.layout import KVConfig, KVLayout


class Role(Enum):
    """What a worker does. A setting, never guessed from traffic."""

    BOTH = "both"
    PREFILL = "prefill"
    """Computes prompts and keeps their KV for decode workers. A request that is not to be handed over is served to its
    end."""
    DECODE = "decode"
    """Starts from KV that a prefill worker hands over. It computes prompts that bring none only where the policy for
    lost KV lets it; what a preemption loses it computes again."""


class LoadFailure(Enum):
    """What becomes of a request whose KV does not arrive from its prefill worker."""

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
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_chunk_tokens", "protect_after_preemptions"):
            whole_number(getattr(self, name), name, at_least=1)
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be larger than max_num_seqs "
                f"({self.max_num_seqs}): each running request needs one row a step, and a prompt one more"
            )

    def check_against(self, layout: KVLayout, kv: KVConfig) -> None:
        """Refuse a KV configuration that was sized for another way of scheduling."""
        if self.step_in_flight and kv.steps_ahead < 2:
            raise ConfigError("step_in_flight plans two steps ahead, but KVConfig.steps_ahead is 1; set it to 2")
        most = min(self.max_chunk_tokens, self.max_num_batched_tokens, kv.max_model_len)
        if kv.step_tokens < most:
            raise ConfigError(
                f"a prompt may advance {most} tokens in a step (max_chunk_tokens {self.max_chunk_tokens}, "
                f"max_num_batched_tokens {self.max_num_batched_tokens}), but KVConfig.step_tokens, by which requests "
                f"are let in, is {kv.step_tokens}; raise it, or lower max_chunk_tokens"
            )
        if self.role is Role.PREFILL and kv.keep_margin < layout.margin:
            raise ConfigError(
                f"a prefill worker keeps {layout.margin} position(s) behind each window for the worker that fetches "
                f"them, but KVConfig.keep_margin is {kv.keep_margin}; set it to KVLayout.margin"
            )
