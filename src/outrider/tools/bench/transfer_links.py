"""The speed of each link, beside a plain copy and beside bare calls to the same library, in turns.

    copy          one copy of as many bytes within a process
    local         the link between engines of one process
    bare, cma     bare calls to NIXL that read the same spans of another process, by copying between processes
    nixl, cma     the link between processes, over the same
    bare, tcp     the same two over tcp on the loopback device
    nixl, tcp

Everything reads one prompt in pages in random order, from memory that has been touched before. A time runs from the
call that starts to read until the reader has been told that the last byte is in place.
"""

from __future__ import annotations

import ctypes
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import msgspec

from outrider.errors import TransferError
from outrider.kv.intervals import SlotRun
from outrider.tools.bench.json_worker import JsonWorker
from outrider.tools.bench.transfer_bare import BareReader
from outrider.tools.bench.transfer_pages import PagedMemory, all_spans, equal, group_reads, prompt_runs, scaled
from outrider.tools.bench.transfer_worker import DIGEST, READER
from outrider.transfer.desk import Desk
from outrider.transfer.leases import LeaseBook
from outrider.transfer.link import Failed, Landed, Link, Received
from outrider.transfer.links.local import LocalLink
from outrider.transfer.links.memory import MemoryMap, Spans
from outrider.transfer.links.nixl import NixlLink
from outrider.transfer.messages import Hello, Renew, Welcome
from outrider.transfer.offers import GroupSignature
from outrider.transfer.tickets import ClusterKey

COPY, LOCAL = "copy", "local"
LIMIT_S = 60.0
"""Time in which an answer or a read must have come."""
SEED = 1


class PagePair(NamedTuple):
    """Numbers of tokens in a page, on the side that is read from and on the side that reads."""

    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.source} to {self.destination}"


class Way(ABC):
    """One way of moving the bytes of a prompt."""

    name: str
    compares_with: str | None = None
    """The way that uses the same means with bare calls."""

    @abstractmethod
    def move(self) -> float:
        """Returns the seconds that it takes."""


class Copy(Way):
    """The plain copy: the first bytes of each arena, in one piece."""

    name = COPY

    def __init__(self, source: PagedMemory, destination: PagedMemory, num_bytes: int) -> None:
        self._pieces = []
        for there, here in zip(source.map.arenas, destination.map.arenas, strict=True):
            length = min(there.total_bytes, here.total_bytes, num_bytes)
            self._pieces.append((here.base, there.base, length))
            num_bytes -= length

    def move(self) -> float:
        started = perf_counter()
        for here, there, length in self._pieces:
            ctypes.memmove(here, there, length)
        return perf_counter() - started


class OverLink(Way):
    """Reads through a link whose peer was met."""

    def __init__(
        self, name: str, link: Link, peer: str, runs: Sequence[tuple[SlotRun, ...]], *, compares_with: str | None
    ) -> None:
        self.name, self.compares_with = name, compares_with
        self._link, self._peer, self._reads = link, peer, group_reads(runs)

    def move(self) -> float:
        # The peer expects reads, as it does after a decode worker has asked for an offer.
        self._link.send(self._peer, Renew(leases=[], reader=READER))
        started = perf_counter()
        waiting = {self._link.read(self._peer, read) for read in self._reads}
        while waiting:
            self._link.wait(LIMIT_S - (perf_counter() - started))
            for event in self._link.poll():
                if isinstance(event, Failed):
                    raise TransferError(f"{self.name}: {event.reason}")
                if isinstance(event, Landed):
                    waiting.discard(event.transfer)
            if perf_counter() - started > LIMIT_S:
                raise TransferError(f"{self.name}: a read has not ended within {LIMIT_S:.0f} s")
        return perf_counter() - started


class Bare(Way):
    def __init__(self, name: str, reader: BareReader, wanted: Spans, worker: JsonWorker) -> None:
        self.name = name
        self._reader, self._wanted, self._worker = reader, wanted, worker

    def move(self) -> float:
        self._worker.ask({"bare": True})
        try:
            return self._reader.read(self._wanted)
        finally:
            self._worker.ask({"stop": True})


def meet(link: Link, peer: str) -> None:
    """Greet a worker and take in its introduction, as a driver does."""
    link.send(peer, Hello(digest=DIGEST, reader=READER))
    limit_s = monotonic() + LIMIT_S
    while monotonic() < limit_s:
        link.wait(limit_s - monotonic())
        for event in link.poll():
            if isinstance(event, Received) and isinstance(event.message, Welcome):
                link.meet(peer, event.message.introduction)
                return
    raise TransferError(f"{peer} has not answered within {LIMIT_S:.0f} s")


def start_worker(settings: dict[str, Any]) -> tuple[JsonWorker, dict[str, Any]]:
    """Returns a worker process and what it says when it is ready."""
    worker = JsonWorker(
        [sys.executable, "-m", "outrider.tools.bench.transfer_worker"],
        failed=lambda log: TransferError(f"a process of the benchmark has ended: {log.strip()[-2000:] or 'silently'}"),
    )
    try:
        # The key goes through the pipe, since the arguments of a process are visible to all users.
        return worker, worker.ask(settings)
    except BaseException:
        worker.close()
        raise


class Case:
    """All ways for one pair of page sizes, ready to be measured."""

    def __init__(
        self, shape: MemoryMap, base_tokens: int, pages: PagePair, num_tokens: int, transports: Sequence[str]
    ) -> None:
        """`transports`: those of nixl to measure; without any, no second process is needed."""
        self.pages = pages
        self.notes: list[str] = []
        self._open = ExitStack()
        there, here = (scaled(shape, page_tokens=each, base_tokens=base_tokens) for each in pages)
        self._source = PagedMemory(there, num_tokens=num_tokens, seed=SEED)
        self._source.fill()
        self._destination = PagedMemory(here, num_tokens=num_tokens, seed=SEED + 1)
        self._runs = prompt_runs(there, self._source.tables, here, self._destination.tables, num_tokens)
        self._expected = all_spans(self._source.map, self._destination.map, self._runs)
        self.num_bytes = self._expected.total_bytes
        self.num_spans = len(self._expected.lengths)
        self.ways: list[Way] = [Copy(self._source, self._destination, self.num_bytes)]
        try:
            self._add_local()
            if transports:
                self._add_nixl(there, num_tokens, transports)
        except BaseException:
            self.close()
            raise

    def _add_local(self) -> None:
        signature = GroupSignature("prompt", "full", 1, 0, "target", "bench")
        desk = Desk(
            engine="local source", digest=DIGEST, signatures=[signature], leases=LeaseBook(LIMIT_S), clock=monotonic
        )
        source = LocalLink(self._source.map, desk, engine="bench source")
        self._open.callback(source.close)
        reader = LocalLink(self._destination.map, None, engine="bench reader")
        self._open.callback(reader.close)
        meet(reader, source.endpoint)
        self.ways.append(OverLink(LOCAL, reader, source.endpoint, self._runs, compares_with=None))

    def _add_nixl(self, there: MemoryMap, num_tokens: int, transports: Sequence[str]) -> None:
        key = secrets.token_urlsafe(32)
        pages = {"shape": msgspec.to_builtins(there), "num_tokens": num_tokens, "seed": SEED, "key": key}
        worker, hello = start_worker({"pages": pages})
        self._open.callback(worker.close)
        remote, metadata = msgspec.convert(hello["memory"], MemoryMap), bytes.fromhex(hello["metadata"])
        wanted = all_spans(remote, self._destination.map, self._runs)
        for transport in transports:
            bare = f"bare, {transport}"
            link = NixlLink(
                self._destination.map, None, ClusterKey(key), host="127.0.0.1", port=0, engine=f"bench {transport}",
                transport=transport,
            )  # fmt: skip
            self._open.callback(link.close)
            try:
                meet(link, hello["endpoint"])
            except TransferError as error:
                self.notes.append(str(error))
                continue
            reader = BareReader(self._destination.map, remote=remote, metadata=metadata, with_cma=transport == "cma")
            self._open.callback(reader.close)
            self.ways.append(Bare(bare, reader, wanted, worker))
            self.ways.append(OverLink(f"nixl, {transport}", link, hello["endpoint"], self._runs, compares_with=bare))

    def warm_up(self) -> None:
        """Move the bytes once in every way, and see that they are the right ones."""
        for way in self.ways:
            self._destination.clear()
            way.move()
            if way.name != COPY and not equal(self._expected):
                raise TransferError(f"{way.name} has moved other bytes than those that were there; please report this")

    def close(self) -> None:
        self._open.close()


def measure_links(
    shape: MemoryMap,
    base_tokens: int,
    *,
    page_sizes: Sequence[PagePair],
    num_tokens: int,
    rounds: int,
    transports: Sequence[str],
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Returns a report for each pair of page sizes. `shape`: an engine's memory, with blocks of `base_tokens`."""
    reports = []
    for pages in page_sizes:
        progress(f"links: pages of {pages} tokens")
        case = Case(shape, base_tokens, pages, num_tokens, transports)
        try:
            case.warm_up()
            times: dict[str, list[float]] = {way.name: [] for way in case.ways}
            for number in range(rounds):
                # Another one goes first in each round.
                first = number % len(case.ways)
                for way in case.ways[first:] + case.ways[:first]:
                    times[way.name].append(way.move())
            reports.append(_report(case, num_tokens, times))
        finally:
            case.close()
    return reports


def _report(case: Case, num_tokens: int, times: dict[str, list[float]]) -> dict[str, Any]:
    def ratio(way: str, to: str | None) -> float | None:
        return None if to is None else median(b / a for a, b in zip(times[way], times[to], strict=True))

    return {
        "source_page_tokens": case.pages.source,
        "destination_page_tokens": case.pages.destination,
        "tokens": num_tokens,
        "bytes": case.num_bytes,
        "spans": case.num_spans,
        "notes": case.notes,
        "ways": {
            way.name: {
                "gb_per_s": case.num_bytes / median(times[way.name]) / 1e9,
                "best_gb_per_s": case.num_bytes / min(times[way.name]) / 1e9,
                "ratio_to_copy": ratio(way.name, COPY),
                "ratio_to_bare": ratio(way.name, way.compares_with),
            }
            for way in case.ways
        },
    }
