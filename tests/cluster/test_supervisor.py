"""Plans, and a supervisor over real processes that die."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster import supervisor as supervising
from outrider.cluster.members import Member, figures_in
from outrider.cluster.plan import ClusterPlan, as_flags
from outrider.cluster.settings import Role
from outrider.cluster.supervisor import SYSTEM_PORTS, Supervisor, free_port, refuse_taken
from outrider.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, "workers"),
        ({"replicas": 1, "prefill": 1, "decode": 1}, "not both"),
        ({"prefill": 1}, "each other"),
        ({"replicas": 1000}, "workers"),
        ({"replicas": 1, "router": "fastest"}, "router"),
        ({"replicas": 1, "restart_first_s": 0}, "restart_first_s"),
        ({"replicas": 1, "worker": "fast"}, "options"),
        ({"replicas": 1, "replica": 1}, "replica"),
    ],
)
def test_plans_that_cannot_be_are_refused(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ClusterPlan(**given)


def test_a_plan_is_read_from_yaml_and_flags_win(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "cluster.yaml"
    path.write_text("prefill: 1\ndecode: 2\nworker: {num_threads: 1}\ndecode_worker: {num_threads: 2}\n")
    plan = ClusterPlan.read(path, port=9000)
    assert plan.roles == (Role.PREFILL, Role.DECODE, Role.DECODE)
    assert (plan.options(Role.PREFILL), plan.options(Role.DECODE)) == ({"num_threads": 1}, {"num_threads": 2})
    assert plan.port == 9000


@pytest.mark.parametrize("text", ["- a\n", "a: [", "speed: 3\nreplicas: 1\n"])
def test_files_that_are_no_plan_are_refused(tmp_path: Path, text: str) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        ClusterPlan.read(path)


def test_options_become_a_command_line() -> None:
    options = {"num_threads": 2, "no_speculation": True, "sanitizer": False, "allowed": ["a", "b"], "x": None}
    assert as_flags(options) == ["--num-threads", "2", "--no-speculation", "--allowed", "a", "--allowed", "b"]


def test_system_ports_fit_the_16_signed_bits_that_dynamo_has_for_them() -> None:
    assert free_port() in SYSTEM_PORTS
    assert max(SYSTEM_PORTS) < 1 << 15


def test_figures_are_read_from_a_workers_metrics() -> None:
    text = (
        '# TYPE x gauge\noutrider_worker_requests_total{worker="a",x="y z"} 3.0\nother 5\n'
        'outrider_worker_kv_usage{a="b"} 0.5\n'
    )
    assert figures_in(text) == {"requests": 3.0, "kv_usage": 0.5}


def test_a_port_that_is_taken_is_refused() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            refuse_taken("127.0.0.1", taken.getsockname()[1])


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A supervisor whose processes are small programs instead of engines."""
    told: list[str] = []
    monkeypatch.setattr(supervising, "refuse_taken", lambda host, port: None)
    plan = ClusterPlan(prefill=1, decode=1, restart_first_s=0.2, restart_most_s=0.5, drain_s=3)
    supervisor = Supervisor(plan, tmp_path, on_change=told.append)
    program = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(60)"
    for member in supervisor.members:
        member.command, member.url = [sys.executable, "-c", program], ""
    return supervisor, told


def pid_of(directory: Path, name: str) -> int | None:
    state = json.loads((directory / "cluster.json").read_text())
    return next(member["pid"] for member in state["members"] if member["name"] == name)


def test_the_cluster_has_a_stand_in_where_prefill_and_decode_are_apart(tmp_path: Path) -> None:
    apart = Supervisor(ClusterPlan(prefill=1, decode=2), tmp_path / "a", on_change=print)
    assert [member.role for member in apart.members] == ["frontend", "prefill", "decode", "decode", "stand-in"]
    whole = Supervisor(ClusterPlan(replicas=2), tmp_path / "b", on_change=print)
    assert [member.role for member in whole.members] == ["frontend", "agg", "agg"]


def test_what_dies_is_withdrawn_and_started_again_later_each_time(watched: Any) -> None:
    supervisor, told = watched
    (victim,) = [member for member in supervisor.members if member.name == "decode-1"]
    listed = supervisor.directory / "discovery" / "v1" / "instances"
    listed.mkdir(parents=True)
    for member in supervisor.members:
        member.start()
    assert victim.state_file is not None
    waits = []
    try:
        for _ in range(3):
            victim.state_file.write_text("abc123")
            (listed / "outrider%2Fbackend%2Fgenerate%2Fabc123").touch()
            (listed / "outrider%2Fbackend%2Fgenerate%2Fother").touch()
            assert victim.process is not None
            victim.process.send_signal(signal.SIGKILL)
            victim.process.wait()
            now = time.monotonic()
            supervisor.tick(now)
            assert [path.name for path in listed.iterdir()] == ["outrider%2Fbackend%2Fgenerate%2Fother"]
            assert pid_of(supervisor.directory, "decode-1") is None
            waits.append(victim.start_at - now)
            supervisor.tick(victim.start_at)
            assert pid_of(supervisor.directory, "decode-1") == victim.process.pid
    finally:
        supervisor.end()
    assert waits == pytest.approx([0.2, 0.4, 0.5])
    assert victim.restarts == 3
    assert "decode-1 ended with signal 9" in told[0]
    assert all(member.process is None for member in supervisor.members)


def test_a_process_that_served_long_starts_again_at_once(tmp_path: Path) -> None:
    member = Member("w", "agg", ["false"], {}, tmp_path / "log", "", first_wait_s=1.0)
    for served_s, wait_s in ((0.0, 1.0), (1.0, 2.0), (100.0, 1.0)):
        member.start()
        assert member.process is not None
        member.process.wait()
        now = time.monotonic()
        member.ready_since = now - served_s
        assert member.reap(now) == 1
        assert member.start_at - now == pytest.approx(wait_s)


def test_a_process_that_does_not_end_is_killed(tmp_path: Path) -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    member = Member("w", "agg", [sys.executable, "-c", program], {}, tmp_path / "log", "")
    member.start()
    process = member.process
    assert process is not None
    while not (tmp_path / "log").read_text():
        time.sleep(0.01)
    member.end(0.2)
    assert process.returncode == -signal.SIGKILL
