"""Settings of a proxy: its workers, its address, and every limit that it enforces."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number
from outrider.server.config import DEFAULT_HOST, DEFAULT_PORT, LOOPBACK, check_seconds

SCHEMES = {"http": 80, "https": 443}


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyConfig:
    prefill: tuple[str, ...]
    """URLs of the workers that compute prompts."""
    decode: tuple[str, ...]
    """URLs of the workers that write the answers."""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """Port to listen on; 0 means any free port."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names in the Host header that a proxy on a loopback address answers to."""

    prompt_characters_min: int = 0
    """Prompts with fewer characters go to a decode worker directly."""
    body_bytes_max: int = 4 << 20
    answer_bytes_max: int = 64 << 20
    """Largest answer of a worker that is not a stream."""
    requests_max: int = 1024
    """Most requests that are open at a time; further ones get a 429."""
    connect_limit_s: float = 5.0
    prefill_limit_s: float = 120.0
    """Time in which a prefill worker must have computed a prompt, before another one is asked."""
    request_limit_s: float = 600.0
    """Time for one request, all attempts included."""
    idle_limit_s: float = 60.0
    """Time after which a client is disconnected that neither receives nor sends anything."""
    drain_limit_s: float = 30.0
    """Time for which running requests may go on after the proxy has been told to end."""
    health_interval_s: float = 2.0
    """Time between two questions to a worker whether it serves."""
    health_limit_s: float = 5.0
    """Time in which a worker must answer that question."""
    health_failures_max: int = 3
    """Questions in a row without an answer after which a worker is lost, and its requests go elsewhere."""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            _check_urls(getattr(self, name), name)
        both = set(self.prefill) & set(self.decode)
        if both:
            raise ConfigError(
                f"{min(both)} is given as a prefill and as a decode worker; a worker that does both needs no proxy, so "
                "give it once"
            )
        for name in ("body_bytes_max", "answer_bytes_max", "requests_max", "health_failures_max"):
            whole_number(getattr(self, name), name, at_least=1)
        for name in ("port", "prompt_characters_min"):
            whole_number(getattr(self, name), name, at_least=0)
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}; 0 means any free port")
        limits = ("connect_limit_s", "prefill_limit_s", "request_limit_s", "idle_limit_s")
        for name in (*limits, "health_interval_s", "health_limit_s"):
            check_seconds(getattr(self, name), name, zero=False)
        check_seconds(self.drain_limit_s, "drain_limit_s", zero=True)

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK


def _check_urls(urls: object, name: str) -> None:
    if not isinstance(urls, tuple) or not urls:
        raise ConfigError(f"a proxy needs at least one {name} worker; give its URL with --{name}")
    for url in urls:
        problem = f"--{name} takes the URL of a worker, such as http://127.0.0.1:8100, got {url!r}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(problem) from None
        if parts.scheme not in SCHEMES or not parts.hostname or port == 0:
            raise ConfigError(problem)
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
            raise ConfigError(f"{problem}; leave out what follows the port, such as /v1")
    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ConfigError(f"--{name} names the same worker twice; give each URL once")
