"""Settings of KV events, with vLLM's names where the meaning is the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number

PUBLISHERS = ("zmq", "null")
EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}'
_ENDPOINT = re.compile(r"(tcp://.+:\d+|ipc://.+|inproc://.+)")
_OURS = re.compile(r"tcp://(\*|0\.0\.0\.0|127\.\d+\.\d+\.\d+|localhost|\[?::1?\]?):\d+|(ipc|inproc)://.*")


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class KVEventsConfig:
    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    """zmq, or null for none."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Address of the events. An address of any or of the local interface is bound, another one is connected to, as for
    a router that collects events at one place. Events contain prompts: bind them to a private network only."""
    replay_endpoint: str | None = None
    """Address, always bound, at which subscribers ask for events that they missed; None for no replay."""
    buffer_steps: int = 10_000
    """Number of batches to keep one by one for replay; what came before them is kept as one batch."""
    hwm: int = 100_000
    """Number of batches that wait for a slow subscriber before it loses some."""
    max_queue_size: int = 100_000
    """Number of steps whose events may wait to be sent before the engine waits for them."""
    topic: str = ""
    """Empty for kv@HOST@MODEL."""

    def __post_init__(self) -> None:
        name = "kv_events_config"
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ConfigError(f"{name}: enable_kv_cache_events must be true or false")
        if self.publisher not in PUBLISHERS:
            raise ConfigError(f"{name}: publisher must be one of {', '.join(PUBLISHERS)}; got {self.publisher!r}")
        if not isinstance(self.topic, str):
            raise ConfigError(f"{name}: topic must be text")
        for field in ("endpoint", "replay_endpoint"):
            value = getattr(self, field)
            if value is None and field == "replay_endpoint":
                continue
            if not isinstance(value, str) or not _ENDPOINT.fullmatch(value):
                raise ConfigError(f"{name}: {field} must be an address such as tcp://127.0.0.1:5557, got {value!r}")
        for field in ("buffer_steps", "hwm", "max_queue_size"):
            whole_number(getattr(self, field), f"{name}: {field}", at_least=1)

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether the address of the events is this machine's own."""
        return _OURS.fullmatch(self.endpoint) is not None

    @classmethod
    def of(cls, given: KVEventsConfig | Mapping[str, Any] | None) -> KVEventsConfig | None:
        """Returns the settings that a user gave as None, as a mapping with vLLM's field names, or as this class."""
        if given is None or isinstance(given, KVEventsConfig):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"kv_events_config must be a mapping such as {EXAMPLE}, got {type(given).__name__}")
        return cls(**{str(name): value for name, value in given.items()})
