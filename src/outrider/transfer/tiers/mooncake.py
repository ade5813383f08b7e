"""Mooncake Store behind the device: a cache that several workers share, and that outlives each of them.

    engine's thread ──jobs──▶ thread of the tier ──messages──▶ store process ──▶ Mooncake
                    ◀──Done──                    ◀──replies──
                              copies pages to and from the stage, and computes and compares trailers

Whatever goes wrong is a miss: a store that does not answer, a node that is gone, a value that is damaged. While the
store is away, nothing waits for it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock, Thread

from outrider.transfer.tier import Done, TierPage
from outrider.transfer.tiers.copying import PageAddresses
from outrider.transfer.tiers.sealing import TRAILER_BYTES, Sealer
from outrider.transfer.tiers.store_messages import Ask, Get, Put, Remove
from outrider.transfer.tiers.store_process import StoreProcess

logger = logging.getLogger("outrider.transfer")

PAGES_MAX = 8
KEYS_MAX = 512
"""More in one call make Mooncake fail."""
CALL_LIMIT_S = 15.0
"""After this, the store process is ended. Mooncake itself gives a call up after some 4 s."""
SLOW_S = 0.1
"""While an earlier question has waited for so long, no further one is asked."""
GONE = frozenset({-900, -800, -1})
"""Codes of a master that does not answer, of a node that is gone, and of a call that raised."""
AWAY_S = 2.0
"""For how long nothing is asked of a store that has just failed."""


def stored_name(key: bytes) -> str:
    """Returns the name of a page in the store."""
    return f"outrider-{blake2b(key, digest_size=32).hexdigest()}"


def stage_bytes(page_bytes: Sequence[int]) -> int:
    """Returns the size of the stage: slots for one batch that comes and one that goes."""
    return 2 * PAGES_MAX * _slot_bytes(page_bytes)


def _slot_bytes(page_bytes: Sequence[int]) -> int:
    return max(page_bytes) + TRAILER_BYTES


@dataclass(slots=True)
class _Call:
    kind: str
    number: int
    pages: Sequence[TierPage] = ()
    keys: list[str] = field(default_factory=list)
    began_s: float = 0.0


class MooncakeTier:
    name = "store"
    is_local = False
    batch_max = PAGES_MAX
    keys_max = KEYS_MAX

    def __init__(self, addresses: PageAddresses, sealer: Sealer, process: StoreProcess) -> None:
        """`process`: its stage has `stage_bytes` of the layout's pages."""
        self._addresses = addresses
        self._sealer = sealer
        self._process = process
        self._slot_bytes = _slot_bytes(addresses.page_bytes)
        self._stage = memoryview(process.stage)
        self._lock = Lock()
        self._jobs: dict[str, deque[_Call]] = {"get": deque(), "put": deque(), "ask": deque()}
        self._open: dict[int, _Call] = {}
        """Calls that the store process has been sent."""
        self._done: deque[Done] = deque()
        self._away_until_s = 0.0
        self._closed = False
        self._ready = os.eventfd(0, os.EFD_NONBLOCK)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = Thread(target=self._run, name="kv-store", daemon=True)
        self._thread.start()

    # ---- the engine's thread -----------------------------------------------------------------------

    def contains(self, key: bytes) -> bool:
        return False

    def touch(self, keys: Sequence[bytes]) -> None:
        """The store sees for itself what is used."""

    def look_up(self, number: int, keys: Sequence[bytes]) -> None:
        self._submit(_Call("ask", number, keys=[stored_name(key) for key in keys]))

    def put(self, number: int, pages: Sequence[TierPage]) -> None:
        self._submit(_Call("put", number, pages, [stored_name(page.key) for page in pages]))

    def get(self, number: int, pages: Sequence[TierPage]) -> None:
        self._submit(_Call("get", number, pages, [stored_name(page.key) for page in pages]))

    def _submit(self, call: _Call) -> None:
        if self._is_away or (call.kind == "ask" and self._is_slow):
            self._fail(call)
            return
        with self._lock:
            self._jobs[call.kind].append(call)
        os.eventfd_write(self._wake, 1)

    @property
    def _is_away(self) -> bool:
        return not self._process.is_ready or time.monotonic() < self._away_until_s

    @property
    def _is_slow(self) -> bool:
        with self._lock:
            asked = [call.began_s for call in self._open.values() if call.kind == "ask"]
        return bool(asked) and time.monotonic() - min(asked) > SLOW_S

    def poll(self) -> list[Done]:
        try:
            os.eventfd_read(self._ready)
        except BlockingIOError:
            return []
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def clear(self) -> None:
        """What others share stays."""

    def fileno(self) -> int:
        return self._ready

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._stage.release()
        self._process.close()
        os.close(self._ready)
        os.close(self._wake)

    # ---- the tier's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            now_s = time.monotonic()
            self._process.tend(now_s)
            self._sleep(now_s)
            now_s = time.monotonic()
            replies = self._process.receive(now_s)
            for reply in replies or ():
                with self._lock:
                    call = self._open.pop(reply.number, None)
                if call is not None:
                    self._replied(call, reply.codes)
            if replies is None:
                self._fail_all()
            elif any(now_s - call.began_s > CALL_LIMIT_S for call in self._open.values()):
                self._process.problem = f"a call took more than {CALL_LIMIT_S:g} s"
                self._process.end(now_s)
                self._fail_all()
            if self._is_away:
                self._fail_waiting()
            for kind, start in (("get", self._start_get), ("ask", self._start_ask), ("put", self._start_put)):
                self._start_next(kind, start)

    def _sleep(self, now_s: float) -> None:
        ends = [self._process.fileno(), self._wake]
        times = [call.began_s + CALL_LIMIT_S for call in self._open.values()]
        next_s = self._process.next_s
        if next_s is not None:
            times.append(next_s)
        limit_s = None if not times else max(0.0, min(times) - now_s) + 0.001
        select.select([end for end in ends if end >= 0], [], [], limit_s)
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass

    def _start_next(self, kind: str, start: Callable[[_Call], bool]) -> None:
        """Start the next call of a kind, unless one is open: each kind has one place on the stage."""
        while self._jobs[kind] and not self._closed and not any(call.kind == kind for call in self._open.values()):
            with self._lock:
                call = self._jobs[kind].popleft()
                call.began_s = time.monotonic()
                self._open[call.number] = call
            if not start(call):
                with self._lock:
                    del self._open[call.number]
                self._fail(call)

    def _start_ask(self, call: _Call) -> bool:
        return self._process.send(Ask(number=call.number, keys=call.keys))

    def _start_get(self, call: _Call) -> bool:
        sizes = [self._addresses.page_bytes[page.group] + TRAILER_BYTES for page in call.pages]
        offsets = [self._slot_bytes * place for place in range(len(call.pages))]
        return self._process.send(Get(number=call.number, keys=call.keys, offsets=offsets, sizes=sizes))

    def _start_put(self, call: _Call) -> bool:
        offsets, sizes = [], []
        for place, page in enumerate(call.pages, start=PAGES_MAX):
            offset, size = self._slot_bytes * place, self._addresses.page_bytes[page.group]
            ctypes.memmove(self._process.stage_address + offset, self._addresses.address(page), size)
            trailer = self._sealer.trailer(page.key, self._stage[offset : offset + size])
            self._stage[offset + size : offset + size + TRAILER_BYTES] = trailer
            offsets.append(offset)
            sizes.append(size + TRAILER_BYTES)
        return self._process.send(Put(number=call.number, keys=call.keys, offsets=offsets, sizes=sizes))

    def _replied(self, call: _Call, codes: Sequence[int]) -> None:
        if len(codes) != len(call.keys) or all(code in GONE for code in codes):
            if time.monotonic() > self._away_until_s:
                logger.warning("the KV store does not answer (code %s); prompts are computed meanwhile", codes[:1])
            self._away_until_s = time.monotonic() + AWAY_S
            self._fail(call)
        elif call.kind == "ask":
            self._report(Done(call.number, tuple(code == 1 for code in codes)))
        elif call.kind == "put":
            self._report(Done(call.number, tuple(code == 0 for code in codes)))
        else:
            self._take(call, codes)

    def _take(self, call: _Call, codes: Sequence[int]) -> None:
        """Copy what has come to its pages, as far as it is what its keys say; drop the rest from the store."""
        loaded, wrong = [], []
        for place, (page, code, name) in enumerate(zip(call.pages, codes, call.keys, strict=True)):
            offset, size = self._slot_bytes * place, self._addresses.page_bytes[page.group]
            data, trailer = self._stage[offset : offset + size], self._stage[offset + size :][:TRAILER_BYTES]
            is_there = code == size + TRAILER_BYTES and self._sealer.is_intact(page.key, data, trailer)
            if is_there:
                ctypes.memmove(self._addresses.address(page), self._process.stage_address + offset, size)
            elif code >= 0:
                wrong.append(name)
            loaded.append(is_there)
        if wrong:
            logger.warning("%d value(s) in the KV store were not what their keys say, and are removed", len(wrong))
            self._process.send(Remove(keys=wrong))
        self._report(Done(call.number, tuple(loaded), refused=len(wrong)))

    def _fail(self, call: _Call) -> None:
        self._report(Done(call.number, (False,) * len(call.keys)))

    def _fail_all(self) -> None:
        """End every call that the store process was sent: it is gone, and so are its calls."""
        with self._lock:
            calls = list(self._open.values())
            self._open.clear()
        for call in calls:
            self._fail(call)

    def _fail_waiting(self) -> None:
        with self._lock:
            calls = [call for jobs in self._jobs.values() for call in jobs]
            for jobs in self._jobs.values():
                jobs.clear()
        for call in calls:
            self._fail(call)

    def _report(self, done: Done) -> None:
        self._done.append(done)
        if not self._closed:
            os.eventfd_write(self._ready, 1)
