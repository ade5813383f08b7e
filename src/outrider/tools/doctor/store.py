"""Can a worker use this Mooncake Store, and how fast is it?

The real store process is started; it connects, writes values and reads them back, and must find that a value which was
sealed under another key is of no use. What it wrote is removed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from outrider.config import KVStoreConfig
from outrider.engine.tiers import store_process, store_secret
from outrider.errors import OutriderError
from outrider.tools.doctor.findings import Finding, Status, bytes_text
from outrider.transfer.tiers.mooncake import PAGES_MAX, stored_name
from outrider.transfer.tiers.sealing import TRAILER_BYTES, Sealer
from outrider.transfer.tiers.store_messages import Ask, Get, Put, Remove
from outrider.transfer.tiers.store_process import StoreProcess

VALUE_BYTES = 1 << 20
CONNECT_LIMIT_S, CALL_LIMIT_S = 20.0, 15.0
ROUNDS = 10
NO_SPACE = "some worker or node must lend memory to the store: global_segment_size"


def examine_store(config: KVStoreConfig) -> list[Finding]:
    """Returns what was found, up to the first problem."""
    try:
        secret = store_secret(config)
        process = store_process(config, (VALUE_BYTES,))
    except OutriderError as problem:
        return [Finding("store", str(problem), Status.PROBLEM)]
    try:
        return _Examination(config, process, Sealer(secret)).run()
    finally:
        process.close()


class _Examination:
    def __init__(self, config: KVStoreConfig, process: StoreProcess, sealer: Sealer) -> None:
        self._config = config
        self._process = process
        self._sealer = sealer
        self._keys = [secrets.token_bytes(64) for _ in range(PAGES_MAX)]
        self._names = [stored_name(key) for key in self._keys]
        self._size = VALUE_BYTES + TRAILER_BYTES
        self._number = 0

    def run(self) -> list[Finding]:
        began_s = time.monotonic()
        try:
            self._process.wait_ready(CONNECT_LIMIT_S)
        except OutriderError as problem:
            advice = f"start mooncake_master, and check that {self._config.master_server_address} is its --rpc_port"
            return [Finding("master", str(problem), Status.PROBLEM, None if self._process.is_hopeless else advice)]
        took_ms = 1e3 * (time.monotonic() - began_s)
        master = self._config.master_server_address
        findings = [Finding("master", f"{master} answered, connected in {took_ms:.0f} ms")]
        for check in (self._look_up, self._write, self._read, self._refuse):
            findings.append(check())
            if findings[-1].status is Status.PROBLEM:
                break
        self._process.send(Remove(keys=self._names))
        # The last message is carried out before the process is ended.
        self._call(lambda number: Ask(number=number, keys=self._names))
        return findings

    def _call(self, order: Callable[[int], Ask | Get | Put]) -> tuple[list[int], float]:
        """Returns the codes of one call and how long it took; no codes if it took too long."""
        self._number += 1
        began_s = time.monotonic()
        self._process.send(order(self._number))
        while time.monotonic() - began_s < CALL_LIMIT_S:
            replies = self._process.receive(time.monotonic())
            if replies is None:
                break
            for reply in replies:
                if reply.number == self._number:
                    return reply.codes, time.monotonic() - began_s
            time.sleep(0.0002)
        return [], time.monotonic() - began_s

    def _look_up(self) -> Finding:
        names = [stored_name(bytes([number % 256]) * 64) for number in range(512)]
        times_s = []
        for _ in range(ROUNDS):
            codes, took_s = self._call(lambda number: Ask(number=number, keys=names))
            if len(codes) != len(names) or any(code < 0 for code in codes):
                return Finding("look-up", f"the store did not say what it holds (codes {codes[:3]})", Status.PROBLEM)
            times_s.append(took_s)
        slowest_ms = 1e3 * max(times_s)
        text = f"512 keys in {1e3 * sorted(times_s)[ROUNDS // 2]:.1f} ms, {slowest_ms:.1f} ms at most"
        if slowest_ms > 20:
            return Finding("look-up", text, Status.NOTE, "requests wait 20 ms at most; what comes later is a miss")
        return Finding("look-up", text)

    def _write(self) -> Finding:
        for place, key in enumerate(self._keys):
            data = secrets.token_bytes(VALUE_BYTES)
            self._process.stage[place * self._size : (place + 1) * self._size] = data + self._sealer.trailer(key, data)
        names, sizes = self._names, [self._size] * PAGES_MAX
        codes, took_s = self._call(lambda number: Put(number=number, keys=names, offsets=self._offsets, sizes=sizes))
        if codes != [0] * PAGES_MAX:
            return Finding("write", f"values could not be stored (codes {codes[:3]})", Status.PROBLEM, NO_SPACE)
        return Finding("write", f"{bytes_text(PAGES_MAX * self._size)} in {1e3 * took_s:.0f} ms")

    def _read(self) -> Finding:
        self._process.stage[:] = bytes(len(self._process.stage))
        names, sizes = self._names, [self._size] * PAGES_MAX
        codes, took_s = self._call(lambda number: Get(number=number, keys=names, offsets=self._offsets, sizes=sizes))
        intact = sum(self._is_intact(self._sealer, place) for place in range(PAGES_MAX))
        if codes != [self._size] * PAGES_MAX or intact < PAGES_MAX:
            text = f"{intact} of {PAGES_MAX} values came back as they were (codes {codes[:3]})"
            return Finding("read", text, Status.PROBLEM, "look at the log of the node that lends the memory")
        speed = PAGES_MAX * self._size / took_s
        return Finding("read", f"{bytes_text(PAGES_MAX * self._size)} in {1e3 * took_s:.0f} ms, {speed / 1e9:.2f} GB/s")

    def _refuse(self) -> Finding:
        """A value that was sealed under another key must be of no use."""
        if self._is_intact(Sealer(secrets.token_bytes(32)), 0):
            return Finding("seal", "a value of another cluster is taken for one of this cluster", Status.PROBLEM)
        return Finding("seal", "values of this cluster are accepted, others are refused")

    def _is_intact(self, sealer: Sealer, place: int) -> bool:
        value = self._process.stage[place * self._size : (place + 1) * self._size]
        return sealer.is_intact(self._keys[place], value[:VALUE_BYTES], value[VALUE_BYTES:])

    @property
    def _offsets(self) -> list[int]:
        return [place * self._size for place in range(PAGES_MAX)]
