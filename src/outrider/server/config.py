"""Settings of a server: its address, its keys, and every limit that it enforces."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number
from outrider.sampling import MAX_LOGPROBS
from outrider.scheduler.request import MOST_FORKS

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_METRICS_PREFIX = "outrider:"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """Port to listen on; 0 means any free port."""
    served_model_names: tuple[str, ...] = ()
    """Names of the model for clients; metrics use the first. Empty means the model's own name."""
    api_keys: tuple[str, ...] = ()
    """Keys of clients; empty means that no key is needed. Each key is a tenant with a prefix cache of its own."""
    admin_keys: tuple[str, ...] = ()
    """Keys of admin routes; without any, these routes do not exist."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names in the Host header that a server without keys on a loopback address answers to."""
    metrics_prefix: str = DEFAULT_METRICS_PREFIX
    log_interval_s: float = 5.0
    """Time between log lines with statistics while there is work; 0 means no such lines."""
    otlp_traces_endpoint: str | None = None

    body_bytes_max: int = 4 << 20
    prompt_tokens_max: int | None = None
    """Longest prompt; None means what the model's context holds."""
    prompts_max: int = 64
    """Most prompts in one request for completions."""
    messages_max: int = 1024
    n_max: int = 16
    logprobs_max: int = MAX_LOGPROBS
    stop_strings_max: int = 16
    stop_characters_max: int = 256
    """Longest stop string."""
    logit_bias_max: int = 1024
    tools_max: int = 128
    grammar_bytes_max: int = 64 << 10
    """Largest JSON schema, regular expression or other grammar, and largest set of tools."""
    render_limit_s: float = 2.0
    """Time to render and tokenize one conversation or prompt; a text process that takes longer is killed."""
    text_processes: int = 2
    queue_max: int = 256
    """Most continuations that wait for a place in the batch."""
    request_limit_s: float = 600.0
    idle_limit_s: float = 60.0
    """Time after which a client is disconnected that neither receives nor sends anything."""
    engine_timeout_s: float = 300.0
    """Time without a finished step after which the engine process is killed and restarted."""
    drain_limit_s: float = 30.0
    """Time for which running requests may go on after the server has been told to end."""

    def __post_init__(self) -> None:
        at_least_1 = (
            "body_bytes_max",
            "prompts_max",
            "messages_max",
            "n_max",
            "stop_strings_max",
            "stop_characters_max",
        )
        for name in (*at_least_1, "grammar_bytes_max", "text_processes"):
            whole_number(getattr(self, name), name, at_least=1)
        if self.prompt_tokens_max is not None:
            whole_number(self.prompt_tokens_max, "prompt_tokens_max", at_least=1)
        for name in ("logprobs_max", "logit_bias_max", "tools_max", "queue_max", "port"):
            whole_number(getattr(self, name), name, at_least=0)
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}; 0 means any free port")
        for name, most in (("n_max", MOST_FORKS), ("logprobs_max", MAX_LOGPROBS)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name} may be at most {most}, got {getattr(self, name)}")
        for name in ("render_limit_s", "request_limit_s", "idle_limit_s", "engine_timeout_s"):
            check_seconds(getattr(self, name), name, zero=False)
        for name in ("drain_limit_s", "log_interval_s"):
            check_seconds(getattr(self, name), name, zero=True)
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_:]*", self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix must be letters, digits, _ and :, such as 'vllm:', got {self.metrics_prefix!r}"
            )
        self._check_keys()

    def _check_keys(self) -> None:
        for name in ("api_keys", "admin_keys"):
            for key in getattr(self, name):
                if not isinstance(key, str) or not key or not key.isascii() or not key.isprintable() or " " in key:
                    raise ConfigError(f"{name}: a key consists of printable ASCII characters without spaces")
        if set(self.api_keys) & set(self.admin_keys):
            raise ConfigError(
                "an admin key is also an API key, so that every client could drain the server; use another"
            )

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK


def check_seconds(value: object, name: str, *, zero: bool) -> None:
    """Refuse anything but a time; 0 only where `zero` says that it means something."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
    if not good or (value == 0 and not zero):
        raise ConfigError(f"{name} must be a number of seconds{'' if zero else ' above 0'}, got {value!r}")
