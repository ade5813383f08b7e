"""Settings of a server: where it listens, whom it lets in, and every limit it keeps. Resolved once."""

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
    """0: any that is free."""
    served_model_names: tuple[str, ...] = ()
    """What clients call the model; the first is reported. Empty: its own name."""
    api_keys: tuple[str, ...] = ()
    """Empty: anybody who can reach the port. Each key is a tenant with a prefix cache of its own."""
    admin_keys: tuple[str, ...] = ()
    """Empty: there are no admin routes."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names in the Host header that a server without keys on a loopback address answers to."""
    metrics_prefix: str = DEFAULT_METRICS_PREFIX
    log_interval_s: float = 5.0
    """How often the figures are logged while there is work; 0: never."""
    otlp_traces_endpoint: str | None = None

    body_bytes_max: int = 4 << 20
    prompt_tokens_max: int | None = None
    """None: what the model's context holds."""
    prompts_max: int = 64
    """Prompts in one request for completions."""
    messages_max: int = 1024
    n_max: int = 16
    logprobs_max: int = MAX_LOGPROBS
    stop_strings_max: int = 16
    stop_characters_max: int = 256
    """Of one stop string."""
    logit_bias_max: int = 1024
    tools_max: int = 128
    grammar_bytes_max: int = 64 << 10
    """Of a JSON schema, a regular expression or any other grammar, and of all tools together."""
    grammar_compile_limit_s: float = 10.0
    render_limit_s: float = 2.0
    """For one conversation or prompt to become tokens; who takes longer is interrupted."""
    text_processes: int = 2
    queue_max: int = 256
    """Continuations that may wait beyond those that run."""
    request_limit_s: float = 600.0
    idle_limit_s: float = 60.0
    """A client that takes nothing, or sends nothing of a body it announced, for so long is left."""
    drain_limit_s: float = 30.0
    """How long requests that run may go on once the server is told to end."""

    def __post_init__(self) -> None:
        for name in (
            "body_bytes_max",
            "prompts_max",
            "messages_max",
            "n_max",
            "stop_strings_max",
            "stop_characters_max",
            "grammar_bytes_max",
            "text_processes",
        ):
            whole_number(getattr(self, name), name, at_least=1)
        for name in ("logprobs_max", "logit_bias_max", "tools_max", "queue_max", "port"):
            whole_number(getattr(self, name), name, at_least=0)
        if self.prompt_tokens_max is not None:
            whole_number(self.prompt_tokens_max, "prompt_tokens_max", at_least=1)
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}; 0 takes any that is free")
        for name, most in (("n_max", MOST_FORKS), ("logprobs_max", MAX_LOGPROBS)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name} may be at most {most}, got {getattr(self, name)}")
        for name in ("grammar_compile_limit_s", "render_limit_s", "request_limit_s", "idle_limit_s", "drain_limit_s"):
            _seconds(getattr(self, name), name, zero=name == "drain_limit_s")
        _seconds(self.log_interval_s, "log_interval_s", zero=True)
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
            raise ConfigError("an admin key is also an API key: whoever may ask could then also drain; use another")

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK


def _seconds(value: object, name: str, *, zero: bool) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
    if not good or (value == 0 and not zero):
        raise ConfigError(f"{name} must be a number of seconds{'' if zero else ' above 0'}, got {value!r}")
