"""What a worker finds out about its machine and its peers'."""

import errno
import os
import subprocess
import sys

import msgspec
import pytest

from outrider.errors import ConfigError
from outrider.transfer.links import machine
from outrider.transfer.links.machine import (
    ProbedMemory,
    can_read_memory,
    checked_address,
    memory_obstacle,
    network_device,
)
from outrider.transfer.links.mailbox import Mailbox


def test_a_process_reads_memory_that_holds_what_the_probe_says() -> None:
    assert can_read_memory(ProbedMemory().probe)


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "another machine"},
        {"process": 1 << 40},
        {"process": -1},
        {"address": 8},
        {"address": -8},
        {"digest": bytes(32)},
    ],
)
def test_anything_else_is_not_taken_for_the_peer(change: dict[str, object]) -> None:
    memory = ProbedMemory()
    assert not can_read_memory(msgspec.structs.replace(memory.probe, **change))


def test_another_process_with_that_number_is_not_taken_for_the_peer() -> None:
    memory = ProbedMemory()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert not can_read_memory(msgspec.structs.replace(memory.probe, process=other.pid))
        assert other.stdin is not None
        other.stdin.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot": "another machine"}, "another machine"),
        ({"address": 8}, "different containers"),
        ({"digest": bytes(32)}, "different containers"),
        ({"process": 2**31 - 1}, "different containers"),
    ],
)
def test_the_reason_is_named(change: dict[str, object], reason: str) -> None:
    memory = ProbedMemory()
    assert memory_obstacle(memory.probe) is None
    assert reason in str(memory_obstacle(msgspec.structs.replace(memory.probe, **change)))


@pytest.mark.parametrize(("number", "reason"), [(errno.EPERM, "ptrace"), (errno.ENOSYS, "not implemented")])
def test_a_system_that_forbids_it_is_named(monkeypatch: pytest.MonkeyPatch, number: int, reason: str) -> None:
    memory = ProbedMemory()
    monkeypatch.setattr(machine, "_read_process_memory", lambda *where: number)
    assert reason in str(memory_obstacle(memory.probe))
    assert not can_read_memory(memory.probe)


def test_loopback_is_the_loopback_device() -> None:
    assert network_device(checked_address("localhost")) == "lo"


@pytest.mark.parametrize("host", ["0.0.0.0", "224.0.0.1", "::1", ""])
def test_addresses_that_peers_cannot_reach_are_refused(host: str) -> None:
    with pytest.raises(ConfigError):
        checked_address(host)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="no network device"):
        network_device("203.0.113.7")


def test_a_mailbox_is_readable_exactly_while_it_has_items() -> None:
    import select

    box: Mailbox[int] = Mailbox()

    def readable() -> bool:
        return bool(select.select([box], [], [], 0)[0])

    assert not readable()
    box.put(1)
    box.put(2)
    assert readable()
    assert box.take() == [1, 2]
    assert not readable()
    box.alarm()
    box.put(3)
    assert box.take() == [3]
    assert readable()
    number = box.fileno()
    box.close()
    box.put(4)
    assert box.take() == []
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(number)
