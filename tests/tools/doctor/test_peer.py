"""`outrider doctor --peer` against real workers in processes of their own, and against what is none."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl_cu12")

from tests.cli.cli import run_main
from tests.server.running import RunningServer
from tests.server.tiny_model import save_tiny_model
from tests.transfer.links.running import Prefiller

from outrider.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.tools.bench.transfer_links import start_worker
from outrider.tools.bench.transfer_pages import PagedMemory
from outrider.tools.bench.transfer_worker import engine_settings
from outrider.tools.doctor import peer, peer_address
from outrider.tools.doctor.findings import Finding, Status
from outrider.tools.doctor.peer import OwnSide, PeerReport, examine_peer
from outrider.transfer.desk import Desk
from outrider.transfer.leases import LeaseBook
from outrider.transfer.links import nixl_agent
from outrider.transfer.links.nixl import NixlLink
from outrider.transfer.messages import PROTOCOL
from outrider.transfer.offers import layout_digest

KEY, OTHER_KEY = "the key of all workers here", "the key of some other cluster"
API_KEY = "key-of-the-tests"
OURS = KVTransferConfig(kv_role="kv_consumer", cluster_key=KEY, answer_limit_s=20.0)
SERVE = ("--backend", "reference", "--num-threads", "1", "--kv-cache-memory-bytes", "8M", "--no-speculation")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def settings(model: Path, **changes: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "model": str(model), "backend": "reference", "device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 8 << 20
    }  # fmt: skip
    return EngineConfig(**(given | changes))


def own_side(config: EngineConfig, transfer: KVTransferConfig = OURS) -> OwnSide:
    return OwnSide.of(build_engine(config), transfer)


@contextmanager
def worker(config: EngineConfig, role: str = "kv_producer") -> Iterator[str]:
    """Yields the endpoint of a worker with an engine, in a process of its own."""
    process, hello = start_worker(
        {"engine": engine_settings(replace(config, kv_transfer_config=replace(OURS, kv_role=role)))}
    )
    try:
        yield str(hello["endpoint"])
    finally:
        process.close()


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[str]:
    with worker(settings(model)) as endpoint:
        yield endpoint


def problems(report: PeerReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.status is Status.PROBLEM]


def only_problem(report: PeerReport) -> Finding:
    (problem,) = problems(report)
    assert not report.healthy
    assert report.as_json()["usable"] == "none"
    return problem


# --- a worker with an engine, asked at its endpoint ---------------------------------------------------


def test_a_worker_like_this_one_is_of_use(model: Path, plain: str) -> None:
    report = examine_peer(plain, own_side(settings(model)))
    assert report.healthy, report.findings
    assert report.usable == "all"
    assert report.transport in ("cma", "tcp")
    assert (report.round_trip_ms or 0.0) > 0
    assert (report.gb_per_s or 0.0) > 0
    assert {"target", "drafter", "transport", "round trip", "reads"} <= {each.name for each in report.findings}


def test_reads_over_tcp_and_pages_of_another_length_work_too(model: Path, plain: str) -> None:
    own = own_side(settings(model, block_size=32), replace(OURS, kv_transport="tcp"))
    report = examine_peer(plain, own)
    assert report.healthy, report.findings
    assert (report.usable, report.transport) == ("all", "tcp")
    assert [finding.text for finding in report.findings if finding.name == "pages"] == ["32 tokens here, 16 there"]


def test_what_differs_is_named(model: Path, plain: str, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    assert only_problem(examine_peer(plain, own_side(settings(other)))).name == "weights"
    found = problems(examine_peer(plain, own_side(settings(model, dtype="bfloat16"))))
    assert [problem.name for problem in found] == ["dtype", "layers"]
    assert "torch.bfloat16" in found[0].text
    assert "--dtype" in str(found[0].advice)


def test_another_drafter_leaves_the_targets_kv(model: Path, plain: str) -> None:
    drafting = settings(model, speculative_config=SpeculativeConfig(method="draft_model", model=str(model)))
    own = own_side(drafting)
    report = examine_peer(plain, own)
    assert report.healthy
    assert report.usable == "target"
    (finding,) = [each for each in report.findings if each.name == "drafter"]
    assert "none with KV" in finding.text
    assert "--speculative-config" in str(finding.advice)
    with worker(drafting) as endpoint:
        assert examine_peer(endpoint, own).usable == "all"
        fewer = settings(
            model, speculative_config=SpeculativeConfig(method="draft_model", model=str(model), num_hidden_layers=1)
        )
        report = examine_peer(endpoint, own_side(fewer))
        assert report.usable == "target"
        assert any("another one" in each.text for each in report.findings)


def test_another_version_of_the_protocol_is_named(model: Path) -> None:
    own = own_side(settings(model))
    desk = Desk(
        engine="other",
        digest=b"another protocol",
        signatures=own.signatures,
        leases=LeaseBook(30.0),
        clock=time.monotonic,
    )
    pages = PagedMemory(own.shape, num_tokens=16, seed=0)
    link = NixlLink(pages.map, desk, own.key, host="127.0.0.1", port=0, engine="other")
    try:
        problem = only_problem(examine_peer(link.endpoint, own))
    finally:
        link.close()
    assert problem.name == "protocol"
    assert "same version" in str(problem.advice)


def test_a_decode_worker_hands_nothing_over(model: Path) -> None:
    with worker(settings(model), "kv_consumer") as endpoint:
        assert "kv_role kv_consumer" in only_problem(examine_peer(endpoint, own_side(settings(model)))).text


def test_another_key_is_told_from_no_answer(model: Path, plain: str) -> None:
    report = examine_peer(plain, own_side(settings(model), replace(OURS, cluster_key=OTHER_KEY, answer_limit_s=1.0)))
    problem = only_problem(report)
    assert problem.name == "cluster key"
    assert "--cluster-key" in str(problem.advice)


def test_a_stopped_worker_is_told_from_a_wrong_key(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_address, "ANSWER_LIMIT_S", 0.5)
    own = own_side(settings(model))
    with Prefiller(key=KEY) as stranger:
        # It has other KV altogether.
        assert {problem.name for problem in problems(examine_peer(stranger.endpoint, own))} == {"layers"}
        stranger.stop()
        problem = only_problem(examine_peer(stranger.endpoint, own))
        assert (problem.name, "stopped" in str(problem.advice)) == ("endpoint", True)


def test_a_worker_that_stops_after_the_first_look_has_no_wrong_key(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_address, "ANSWER_LIMIT_S", 0.5)
    own = own_side(settings(model), replace(OURS, answer_limit_s=0.5))
    with Prefiller(key=KEY) as stranger:
        looks = 0

        def check_and_stop(endpoint: str) -> None:
            nonlocal looks
            peer_address.check_endpoint(endpoint)
            stranger.stop()
            looks += 1

        monkeypatch.setattr(peer, "check_endpoint", check_and_stop)
        problem = only_problem(examine_peer(stranger.endpoint, own))
        assert looks == 1
        assert (problem.name, "stopped" in str(problem.advice)) == ("endpoint", True)


def test_reading_leaves_the_worker_as_it_is(model: Path) -> None:
    """A worker that was examined hands over and holds what it did before."""
    given = replace(settings(model), kv_transfer_config=replace(OURS, kv_role="kv_producer"))
    process, hello = start_worker({"engine": engine_settings(given)})
    try:
        before = process.ask({"prompt": [5, 6, 7], "max_tokens": 4})
        assert examine_peer(hello["endpoint"], own_side(settings(model))).healthy
        after = process.ask({"prompt": [5, 6, 7], "max_tokens": 4})
        assert None not in (before["ticket"], after["ticket"])
        assert before["tokens"] == after["tokens"]
    finally:
        process.close()


def test_without_nixl_the_advice_is_to_install_it(model: Path, plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_side(settings(model))
    monkeypatch.setattr(nixl_agent, "MODULES", ("nixl_that_is_not_there",))
    nixl_agent.load_nixl.cache_clear()
    try:
        assert "pip install 'outrider[pd]'" in str(only_problem(examine_peer(plain, own)).advice)
        # What the route says still tells whether the workers fit.
        with web_server(200, facts(layout_digest=layout_digest(own.layout, own.identity).hex())) as url:
            assert "like this engine's" in only_problem(examine_peer(url, own)).text
        with web_server(200, facts()) as url:
            assert "differs from this engine's" in only_problem(examine_peer(url, own)).text
    finally:
        nixl_agent.load_nixl.cache_clear()


# --- what is no worker --------------------------------------------------------------------------------


@contextmanager
def web_server(status: int, body: Any) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_HEAD = do_GET  # noqa: N815 - the base class's name

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def facts(**changes: Any) -> dict[str, Any]:
    given = {
        "role": "kv_producer", "connector": "nixl", "endpoint": "127.0.0.1:9", "engine_id": "e", "protocol": PROTOCOL,
        "layout_digest": "00",
    }  # fmt: skip
    return given | changes


def error(code: str | None, message: str = "no") -> dict[str, Any]:
    return {"error": {"message": message, "type": "error", "code": code, "param": None}}


@pytest.mark.parametrize(
    ("status", "body", "name", "advice"),
    [
        (200, b"<html>It works!</html>", "HTTP", "not a proxy"),
        (200, {"role": "kv_producer"}, "HTTP", "same version"),
        (404, b"not found", "HTTP", "not a proxy"),
        (404, error("not_found"), "HTTP", "--kv-transfer-config"),
        (404, error("kv_transfer_not_configured"), "HTTP", "--cluster-key"),
        (401, error("invalid_api_key"), "HTTP", "--api-key"),
        (503, error("not_ready", "loading weights"), "HTTP", "/ready"),
        (500, error(None, "something broke"), "HTTP", "log"),
        (200, facts(connector="local"), "connector", "kv_connector nixl"),
        (200, facts(role="kv_consumer"), "role", "kv_producer"),
        (200, facts(protocol=PROTOCOL + 1), "protocol", "same version"),
        (200, facts(endpoint="not an endpoint"), "address", "HOST:PORT"),
        (200, facts(), "endpoint", "firewall"),
    ],
)
def test_every_answer_over_http_says_what_to_do_next(
    model: Path, status: int, body: Any, name: str, advice: str
) -> None:
    own = own_side(settings(model))
    with web_server(status, body) as url:
        problem = only_problem(examine_peer(url, own))
        assert problem.name == name
        assert advice in str(problem.advice)


def silent_port() -> Iterator[str]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def web_port() -> Iterator[str]:
    with web_server(200, b"hello") as url:
        yield url.removeprefix("http://")


@pytest.mark.parametrize(
    ("port", "advice"),
    [(silent_port, "stopped"), (web_port, "write http://")],
)
def test_a_port_that_is_no_endpoint_is_described(
    model: Path, monkeypatch: pytest.MonkeyPatch, port: Callable[[], Iterator[str]], advice: str
) -> None:
    monkeypatch.setattr(peer_address, "ANSWER_LIMIT_S", 0.5)
    opened = port()
    try:
        assert advice in str(only_problem(examine_peer(next(opened), own_side(settings(model)))).advice)
    finally:
        list(opened)


def test_an_endpoint_that_is_given_as_a_url_is_recognised(model: Path, plain: str) -> None:
    assert "without http://" in str(only_problem(examine_peer(f"http://{plain}", own_side(settings(model)))).advice)


def test_an_endpoint_that_only_the_workers_own_machine_can_reach_is_noticed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_address, "_is_this_machine", lambda host: False)
    with web_server(200, facts()) as url:
        problem = only_problem(examine_peer(url, own_side(settings(model))))
    assert "kv_ip" in str(problem.advice)


@pytest.mark.parametrize(
    "address",
    ["", "worker", "worker:", "worker:x", "127.0.0.1:80/kv", "http://", "http://:1", "[::1", "http://[::1"],
)
def test_an_address_without_a_meaning_is_refused(model: Path, address: str) -> None:
    assert only_problem(examine_peer(address, own_side(settings(model)))).advice


# --- the command, against real servers ----------------------------------------------------------------


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """A prefill worker with an API key, and the file with its cluster key."""
    key = tmp_path_factory.mktemp("key") / "cluster.txt"
    key.write_text(KEY)
    transfer = json.dumps({"kv_role": "kv_producer"})
    server = RunningServer(
        model, *SERVE, "--api-key", API_KEY, "--kv-transfer-config", transfer, "--cluster-key", f"@{key}"
    )
    try:
        yield server.wait(), key
    finally:
        server.stop()


def test_a_real_server_is_examined(
    served: tuple[RunningServer, Path], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, key = served
    arguments = ["doctor", model, *SERVE, "--peer", server.url, "--cluster-key", f"@{key}"]

    def doctor(*more: str) -> Any:
        return run_main(monkeypatch, capsys, [*arguments, *more], "")

    done = doctor("--api-key", API_KEY, "--json")
    assert done.status == 0, done.out + done.err
    report = json.loads(done.out)
    assert report["healthy"]
    (peer,) = report["peers"]
    assert (peer["peer"], peer["usable"]) == (server.url, "all")
    assert peer["gb_per_s"] > 0
    locked = doctor()
    assert locked.status == 1
    assert "--api-key" in locked.out
    assert "of no use" in locked.out
    both = doctor("--api-key", API_KEY, "--peer", "127.0.0.1:9", "--json")
    assert both.status == 1
    assert [peer["healthy"] for peer in json.loads(both.out)["peers"]] == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peer", "http://127.0.0.1:9"], "--cluster-key @FILE"),
        (["--peer", "http://127.0.0.1:9", "--memory"], "exclude each other"),
        (["--cluster-key", KEY], "--peer URL"),
        (
            [
                *("--peer", "http://127.0.0.1:9", "--cluster-key", KEY),
                *("--kv-transfer-config", json.dumps({"kv_role": "kv_producer"})),
            ],
            "kv_consumer",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OUTRIDER_CLUSTER_KEY", raising=False)
    done = run_main(monkeypatch, capsys, ["doctor", *options], "")
    assert done.status == 2
    assert message in " ".join(done.err.split())
