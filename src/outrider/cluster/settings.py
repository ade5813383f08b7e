"""Settings of one worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from outrider.config import EngineConfig


class Role(Enum):
    """What a worker does for the cluster."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    """A worker that computes prompts and hands their KV over."""
    DECODE = "decode"
    """A worker that writes answers, from the KV of a prefill worker or from a prompt that it computes itself."""

    @property
    def kv_role(self) -> str | None:
        """The role in the transfer of KV; None for workers that hand nothing over."""
        return {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}.get(self)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    engine: EngineConfig
    role: Role
    name: str
    """Name of this worker in logs."""
    served_model: str
    namespace: str
    files: Path
    """Directory for the files that the front end reads."""
    context_tokens: int
    """Longest text, which must be the same on all workers: the front end takes no two descriptions of a model."""
    drain_s: float
    """Time in which running requests may finish after SIGTERM."""
    marks: Path | None
    """Directory that all workers share, by which a migrated request is told from a new one; None if there is none."""
    request_log: Path | None = None
    """File to which a line of JSON is appended for each request."""
    state_file: Path | None = None
    """File that is given the worker's number in the cluster, for the process that watches it."""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
