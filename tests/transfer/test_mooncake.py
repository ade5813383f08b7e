"""A Mooncake Store behind the device: what it holds warms other workers, and whatever goes wrong is a miss."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.tiny import tiny_engine
from tests.requirements import missing
from tests.server.tiny_model import save_tiny_model
from tests.transfer.test_host_tier import Device, text_pages

from outrider.config import KVStoreConfig
from outrider.errors import ConfigError
from outrider.tools.own_network import in_own_network
from outrider.transfer.tier import Done
from outrider.transfer.tiers import mooncake
from outrider.transfer.tiers.mooncake import PAGES_MAX, MooncakeTier, stage_bytes, stored_name
from outrider.transfer.tiers.sealing import TRAILER_BYTES, Sealer
from outrider.transfer.tiers.store_messages import Ask, Get, Put, Remove, Reply

PAGE_BYTES = 4000
SIZE = PAGE_BYTES + TRAILER_BYTES
SEALER = Sealer(b"secret")


class FakeProcess:
    """A store process whose store is a dictionary, and that answers when the test says so."""

    def __init__(self) -> None:
        self.stage = mmap.mmap(-1, stage_bytes((PAGE_BYTES,)))
        self.stage_address = ctypes.addressof(ctypes.c_char.from_buffer(self.stage))
        self.is_ready = True
        self.problem = ""
        self.next_s: float | None = None
        self.values: dict[str, bytes] = {}
        self.removed: list[str] = []
        self.sent: list[Any] = []
        self.replies: list[Reply] = []
        self.answers: Callable[[Any], list[int]] = self.answer
        self.is_silent = False
        self.ended = 0
        self.dies = False
        self._ready = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._ready

    def tend(self, now_s: float) -> None: ...

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        if isinstance(message, Remove):
            self.removed += message.keys
        elif not self.is_silent:
            self.replies.append(Reply(number=message.number, codes=self.answers(message)))
            os.eventfd_write(self._ready, 1)
        return True

    def answer(self, message: Any) -> list[int]:
        match message:
            case Ask(keys=keys):
                return [int(key in self.values) for key in keys]
            case Put(keys=keys, offsets=offsets, sizes=sizes):
                for key, offset, size in zip(keys, offsets, sizes, strict=True):
                    self.values[key] = bytes(self.stage[offset : offset + size])
                return [0] * len(keys)
            case Get(keys=keys, offsets=offsets):
                return [self._load(key, offset) for key, offset in zip(keys, offsets, strict=True)]
        raise AssertionError(message)

    def _load(self, key: str, offset: int) -> int:
        value = self.values.get(key)
        if value is None:
            return -704
        self.stage[offset : offset + len(value)] = value
        return len(value)

    def receive(self, now_s: float) -> list[Reply] | None:
        try:
            os.eventfd_read(self._ready)
        except BlockingIOError:
            pass
        if self.dies:
            self.dies = self.is_ready = False
            return None
        replies, self.replies = self.replies, []
        return replies

    def die(self) -> None:
        self.dies = True
        os.eventfd_write(self._ready, 1)

    def end(self, now_s: float) -> None:
        self.ended += 1
        self.is_ready = False

    def close(self) -> None:
        os.close(self._ready)


class Scene:
    def __init__(self) -> None:
        self.device, self.process = Device(40), FakeProcess()
        self.tier = MooncakeTier(self.device.addresses, SEALER, self.process)  # type: ignore[arg-type]
        self.pages = text_pages("text", 3)
        for page in self.pages:
            self.device.fill(page.page, page.page)
        self.elsewhere = [page._replace(page=page.page + 10) for page in self.pages]

    def wait(self, limit_s: float = 10.0) -> list[Done]:
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            done = self.tier.poll()
            if done:
                return done
            time.sleep(0.001)
        return []


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    try:
        yield made
    finally:
        made.tier.close()


def test_what_was_stored_is_found_and_comes_back(scene: Scene) -> None:
    scene.tier.put(1, scene.pages)
    assert scene.wait() == [Done(1, (True,) * 3)]
    assert set(scene.process.values) == {stored_name(page.key) for page in scene.pages}
    scene.tier.look_up(2, [scene.pages[0].key, b"another key", scene.pages[2].key])
    assert scene.wait() == [Done(2, (True, False, True))]
    scene.tier.get(3, scene.elsewhere)
    assert scene.wait() == [Done(3, (True,) * 3)]
    assert [scene.device.holds(page.page, page.page - 10) for page in scene.elsewhere] == [True] * 3


@pytest.mark.parametrize("what", ["bit", "other page", "short", "other secret"])
def test_a_value_that_is_not_what_its_key_says_is_refused_and_removed(scene: Scene, what: str) -> None:
    scene.tier.put(1, scene.pages)
    scene.wait()
    first, second, _third = (stored_name(page.key) for page in scene.pages)
    values = scene.process.values
    if what == "bit":
        values[second] = values[second][:5] + bytes([values[second][5] ^ 1]) + values[second][6:]
    elif what == "other page":
        values[second] = values[first]
    elif what == "short":
        values[second] = values[second][:100]
    else:
        data = values[second][:PAGE_BYTES]
        values[second] = data + Sealer(b"another").trailer(scene.pages[1].key, data)
    scene.tier.get(2, scene.elsewhere)
    assert scene.wait() == [Done(2, (True, False, True), refused=1)]
    assert scene.process.removed == [second]
    assert scene.device.holds(scene.elsewhere[1].page, 0), "nothing of it reaches the device"


def test_a_missing_value_is_a_miss_and_the_store_is_asked_again(scene: Scene) -> None:
    scene.tier.get(1, scene.elsewhere)
    assert scene.wait() == [Done(1, (False,) * 3)]
    assert scene.process.removed == []
    scene.tier.look_up(2, [page.key for page in scene.pages])
    assert scene.wait() == [Done(2, (False,) * 3)]
    assert isinstance(scene.process.sent[-1], Ask)


def test_nothing_is_asked_of_a_store_that_has_just_failed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.process.answers = lambda message: [-900] * len(message.keys)
    scene.tier.look_up(1, [page.key for page in scene.pages])
    assert scene.wait() == [Done(1, (False,) * 3)]
    sent = len(scene.process.sent)
    scene.tier.look_up(2, [scene.pages[0].key])
    scene.tier.put(3, scene.pages)
    assert [done.number for done in scene.wait()] == [2, 3]
    assert len(scene.process.sent) == sent
    scene.process.answers = scene.process.answer
    monkeypatch.setattr(mooncake.time, "monotonic", lambda now=time.monotonic: now() + mooncake.AWAY_S)
    scene.tier.put(4, scene.pages)
    assert scene.wait() == [Done(4, (True,) * 3)]


def test_a_full_store_is_not_taken_for_one_that_is_gone(scene: Scene) -> None:
    scene.process.answers = lambda message: [-200] * len(message.keys)
    scene.tier.put(1, scene.pages)
    assert scene.wait() == [Done(1, (False,) * 3)]
    scene.process.answers = scene.process.answer
    scene.tier.put(2, scene.pages)
    assert scene.wait() == [Done(2, (True,) * 3)]


def test_calls_of_a_process_that_dies_are_misses(scene: Scene) -> None:
    scene.process.is_silent = True
    scene.tier.get(1, scene.elsewhere)
    scene.tier.put(2, scene.pages)
    scene.tier.look_up(3, [scene.pages[0].key])
    while len(scene.process.sent) < 3:
        time.sleep(0.001)
    scene.process.die()
    done: list[Done] = []
    while len(done) < 3:
        done += scene.wait()
    assert {each.number: each.outcomes for each in done} == {1: (False,) * 3, 2: (False,) * 3, 3: (False,)}
    scene.tier.look_up(4, [scene.pages[0].key])
    assert scene.wait() == [Done(4, (False,))], "there is none to ask"


def test_a_call_that_never_ends_ends_the_process(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "CALL_LIMIT_S", 0.05)
    scene.process.is_silent = True
    scene.tier.get(1, scene.elsewhere)
    assert scene.wait() == [Done(1, (False,) * 3)]
    assert scene.process.ended == 1


def test_while_a_question_waits_for_long_no_further_one_is_asked(scene: Scene) -> None:
    scene.process.is_silent = True
    scene.tier.look_up(1, [scene.pages[0].key])
    while not scene.process.sent:
        time.sleep(0.001)
    time.sleep(mooncake.SLOW_S * 1.5)
    scene.tier.look_up(2, [scene.pages[1].key])
    assert scene.wait() == [Done(2, (False,))]
    assert len(scene.process.sent) == 1


def test_the_stage_has_room_for_a_batch_each_way() -> None:
    assert stage_bytes((100, PAGE_BYTES)) == 2 * PAGES_MAX * SIZE


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = KVStoreConfig(master_server_address="127.0.0.1:1")
    with pytest.raises(ConfigError, match="needs a cluster key"):
        tiny_engine(kv_store_config=config)
    monkeypatch.setattr("outrider.transfer.tiers.store_process.find_spec", lambda name: None)
    keyed = KVStoreConfig(master_server_address="127.0.0.1:1", cluster_key="a key of sixteen characters")
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[store\]'.*libibverbs1"):
        tiny_engine(kv_store_config=keyed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "master_server_address"),
        ({"master_server_address": "nowhere"}, "HOST:PORT"),
        ({"master_server_address": "a:1", "replica_num": 0}, "replica_num"),
        ({"master_server_address": "a:1", "global_segment_size": "much"}, "global_segment_size"),
        ({"master_server_address": "a:1", "kv_retention": "some"}, "kv_retention"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVStoreConfig.of(settings)


# ---- the real store --------------------------------------------------------------------------------------


def own_network(*command: str) -> list[str]:
    """Skips the test where the real store cannot run."""
    if importlib.util.find_spec("mooncake") is None:
        missing("mooncake", "mooncake is not installed")
    loads = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if loads.returncode:
        missing("mooncake", f"mooncake cannot be loaded: {loads.stderr.strip().splitlines()[-1]}")
    try:
        return in_own_network(command)
    except ConfigError as problem:
        missing("mooncake", f"mooncake listens on all interfaces: {problem}")


def test_a_real_store_warms_another_worker_and_survives_deaths_and_damage(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    options = ["--backend", "reference", "--num-threads", "1", "--kv-cache-memory-bytes", "8M"]
    checks = ["--sanitizer", "raise", "--sanitizer-level", "bytes", "--json"]
    drafts = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    sizes = ["--prompts", "3", "--prompt-tokens", "100", "--answer-tokens", "8"]
    program = str(Path(sys.executable).parent / "outrider")
    command = own_network(program, "bench", "store", str(model), *options, *checks, *drafts, *sizes)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(ran.stdout)
    phases = {phase["name"]: phase for phase in report["phases"]}
    assert report["violations"] == []
    assert [phase["wrong_texts"] for phase in phases.values()] == [0] * 7
    assert phases["warmed by the first"]["hit_tokens"] == 3 * 96
    assert phases["master killed"]["hit_tokens"] == phases["node killed"]["hit_tokens"] == 0
    assert phases["master restarted"]["hit_tokens"] == phases["node restarted"]["hit_tokens"] == 3 * 96
    assert phases["values damaged"]["counters"]["refused"] >= 9


def test_the_doctor_says_what_is_wrong_with_a_store() -> None:
    program = str(Path(sys.executable).parent / "outrider")
    store = '{"master_server_address": "127.0.0.1:50061"}'
    doctor = [program, "doctor", "--store", "--kv-store-config", store, "--cluster-key", "a key for this test"]
    master = str(Path(sys.executable).parent / "mooncake_master")
    flags = "--rpc_address=127.0.0.1 --rpc_port=50061 --metrics_host=127.0.0.1 --metrics_port=50062"
    script = f'{master} {flags} >/dev/null 2>&1 & sleep 2; "$@"; status=$?; kill %1; exit $status'
    command = own_network("bash", "-mc", script, "bash", *doctor, "--json")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    findings = {finding["name"]: finding for finding in json.loads(ran.stdout)["store"]}
    assert findings["master"]["status"] == "ok"
    assert findings["write"]["status"] == "problem"
    assert "global_segment_size" in findings["write"]["advice"]
