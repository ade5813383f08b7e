"""Settings of a proxy: its workers, its address, and every limit that it enforces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from urllib.parse import urlsplit

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number
from outrider.server.config import DEFAULT_HOST, DEFAULT_PORT, LOOPBACK, check_seconds

SCHEMES = {"http": 80, "https": 443}
PORT_MAX = 65535
WORKER_URL = re.compile(r"https?://(?P<host>\[[^\]]*\]|[^/:\[\]]+)(:(?P<port>[0-9]{1,5}))?/?", re.IGNORECASE)
HOST_NAME = re.compile(r"(?=.{1,253}\.?$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?", re.IGNORECASE | re.ASCII)


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
        decode = _addresses(self.decode)
        both = [url for address, url in _addresses(self.prefill).items() if address in decode]
        if both:
            raise ConfigError(
                f"{both[0]} is given as a prefill and as a decode worker; a worker that does both needs no proxy, so "
                "give it once"
            )
        for name in ("body_bytes_max", "answer_bytes_max", "requests_max", "health_failures_max"):
            whole_number(getattr(self, name), name, at_least=1)
        for name in ("port", "prompt_characters_min"):
            whole_number(getattr(self, name), name, at_least=0)
        if self.port > PORT_MAX:
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
        if isinstance(url, str) and "@" in url:
            # The URL is not repeated, since it holds a password.
            raise ConfigError(
                f"--{name} takes URLs without a user name or password; clients bring their own API keys, which the "
                "proxy passes on"
            )
        parts = WORKER_URL.fullmatch(url) if isinstance(url, str) else None
        if parts is None or not _is_host(parts["host"]) or not 0 < int(parts["port"] or 1) <= PORT_MAX:
            raise ConfigError(
                f"--{name} takes the URL of a worker, such as http://127.0.0.1:8100, without anything after the port, "
                f"such as /v1; got {url!r}"
            )
    if len(_addresses(urls)) < len(urls):
        raise ConfigError(f"--{name} names the same worker twice; give each URL once")


def _is_host(host: str) -> bool:
    if not host.startswith("["):
        return bool(HOST_NAME.fullmatch(host))
    try:
        IPv6Address(host[1:-1])
    except AddressValueError:
        return False
    return True


def _addresses(urls: tuple[str, ...]) -> dict[tuple[str, int], str]:
    """Returns the URLs by host and port: one worker's URL can be written in several ways."""
    split = [(url, urlsplit(url)) for url in urls]
    return {(parts.hostname or "", parts.port or SCHEMES[parts.scheme]): url for url, parts in split}
