"""How requests arrive at a server that is measured: by clients that wait for their answers, at random, or in bursts.

    closed     N clients; each sends its next request when it has the answer to the one before
    Poisson    requests arrive independently of each other and of the answers, R a second on average
    bursts     N requests arrive at once, every S seconds

The last two do not wait for a slow server: requests pile up there, as those of real users do.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.tools.number_lists import whole_numbers

CLIENTS_MAX = 1_024
"""Most requests in flight: each has a thread."""
SLICE_S = 0.5
"""Longest wait between two looks at whether the run was interrupted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    clients: int = 0
    """Clients of a closed load; the number in each burst for bursts; 0 for Poisson arrivals."""
    rate_per_s: float = 0.0
    every_s: float = 0.0

    def __post_init__(self) -> None:
        if self.clients > CLIENTS_MAX:
            raise ConfigError(f"at most {CLIENTS_MAX:,} clients can send requests at once, got {self.clients:,}")

    @property
    def name(self) -> str:
        if self.rate_per_s:
            return f"{self.rate_per_s:g} a second"
        if self.every_s:
            return f"{self.clients} every {self.every_s:g} s"
        return f"{self.clients} client{'s' * (self.clients > 1)}"

    @property
    def is_closed(self) -> bool:
        return not self.rate_per_s and not self.every_s

    def arrival_times_s(self, requests: int, seed: int) -> list[float]:
        """Returns when each request arrives, from the start on; a seed gives the same times in every run."""
        assert not self.is_closed
        if self.every_s:
            return [number // self.clients * self.every_s for number in range(requests)]
        chance, now, times = random.Random(seed), 0.0, []
        for _ in range(requests):
            times.append(now)
            now += chance.expovariate(self.rate_per_s)
        return times

    def as_json(self) -> dict[str, Any]:
        kind = "closed" if self.is_closed else "bursts" if self.every_s else "poisson"
        return {"kind": kind, "clients": self.clients, "rate_per_s": self.rate_per_s, "every_s": self.every_s}


def closed_loads(text: str) -> list[Load]:
    """Returns the loads that "1,2,4" stands for: as many clients."""
    return [Load(clients=clients) for clients in whole_numbers(text, "--concurrency")]


def poisson_loads(text: str) -> list[Load]:
    """Returns the loads that "0.5,2" stands for: as many requests a second."""
    return [Load(rate_per_s=_positive(each, "--rate", "0.5,2")) for each in _parts(text)]


def burst_loads(text: str) -> list[Load]:
    """Returns the loads that "8/2.0" stands for: 8 requests at once, every 2 seconds."""
    found = []
    for each in _parts(text):
        number, slash, seconds = each.partition("/")
        if not slash:
            raise ConfigError(f"--burst takes requests/seconds such as 8/2.0, got {each!r}")
        clients = whole_numbers(number, "--burst")
        if len(clients) != 1:
            raise ConfigError(f"--burst takes requests/seconds such as 8/2.0, got {each!r}")
        found.append(Load(clients=clients[0], every_s=_positive(seconds, "--burst", "8/2.0")))
    return found


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _positive(text: str, option: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{option} takes numbers above 0 such as {example}, got {text!r}")
    return value


def send_all(load: Load, requests: int, send: Callable[[int], None], *, seed: int = 0) -> None:
    """Calls `send` with the number of each request, in threads, as the load says; returns after the last answer.

    `send` must not raise: what becomes of a request is its result.
    """
    if load.is_closed:
        _send_closed(load.clients, requests, send)
    else:
        _send_open(load.arrival_times_s(requests, seed), send)


def _send_closed(clients: int, requests: int, send: Callable[[int], None]) -> None:
    numbers, lock = iter(range(requests)), threading.Lock()

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            send(number)

    _run([threading.Thread(target=client, daemon=True) for _ in range(min(clients, requests))])


def _send_open(times_s: list[float], send: Callable[[int], None]) -> None:
    started = time.perf_counter()
    threads = []
    for number, arrives_s in enumerate(times_s):
        time.sleep(max(0.0, started + arrives_s - time.perf_counter()))
        thread = threading.Thread(target=send, args=(number,), daemon=True)
        thread.start()
        threads.append(thread)
    _join(threads)


def _run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    _join(threads)


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        # In slices, so that Ctrl-C ends the measurement at once.
        while thread.is_alive():
            thread.join(SLICE_S)
