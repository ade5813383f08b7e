"""Control messages: who is heard, and what becomes of everything that is no message."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from outrider.errors import ConfigError
from outrider.transfer.links import control
from outrider.transfer.links.control import (
    MESSAGES_PER_TURN,
    QUEUED_MESSAGES_MAX,
    Answer,
    Complaints,
    ControlPlane,
    KeyPair,
    Question,
)
from outrider.transfer.messages import MESSAGE_BYTES_MAX, Fetch, Refused, encode
from outrider.transfer.tickets import ClusterKey

KEY = ClusterKey("a key that the tests share")
ANOTHER_KEY = ClusterKey("a key that the tests do not share")
FETCH = encode(Fetch(lease=bytes(16), reader="d"))
REFUSED = encode(Refused(reason="no"))


@contextmanager
def plane(key: ClusterKey = KEY, port: int = 0) -> Iterator[ControlPlane]:
    made = ControlPlane(key, address="127.0.0.1", port=port, complaints=Complaints())
    try:
        yield made
    finally:
        made.close()


def counts(of: ControlPlane) -> dict[str, int]:
    return dict(of._complaints.counts)


def until(
    done: Callable[[list[Question | Answer]], object], *planes: ControlPlane, limit_s: float = 3.0
) -> list[Question | Answer]:
    """Turn all planes until what was received suffices; returns what was received."""
    received: list[Question | Answer] = []
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s and not done(received):
        for each in planes:
            received += each.receive()
        time.sleep(0.001)
    return received


@contextmanager
def client(endpoint: str, key: ClusterKey | None = KEY, **options: Any) -> Iterator[zmq.Socket[bytes]]:
    """Yields a bare socket that may send anything."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.linger = 0
    for name, value in options.items():
        setattr(made, name, value)
    if key is not None:
        made.curve_serverkey = KeyPair.derive(KEY, "control server").public
        made.curve_publickey, made.curve_secretkey = KeyPair.derive(key, "control client")
    made.connect(f"tcp://{endpoint}")
    try:
        yield made
    finally:
        context.destroy(linger=0)


def test_a_question_is_answered() -> None:
    with plane() as prefill, plane() as decode:
        decode.send(prefill.endpoint, FETCH)
        (question,) = until(len, prefill, decode)
        assert isinstance(question, Question)
        prefill.answer(question, REFUSED)
        assert until(len, prefill, decode) == [Answer(prefill.endpoint, Refused(reason="no"))]


@pytest.mark.parametrize("key", [None, ANOTHER_KEY])
def test_a_peer_without_the_key_is_not_heard(key: ClusterKey | None) -> None:
    with plane() as prefill, client(prefill.endpoint, key) as stranger, client(prefill.endpoint) as member:
        stranger.send(FETCH)
        assert until(len, prefill, limit_s=0.5) == []
        assert not stranger.poll(0)
        member.send(FETCH)
        assert len(until(len, prefill)) == 1


def test_a_client_key_of_its_own_making_is_rejected() -> None:
    """Such a client knows the server's public key, but not the cluster's."""
    with plane() as prefill, client(prefill.endpoint, ANOTHER_KEY) as stranger:
        stranger.send(FETCH)
        assert until(len, prefill, limit_s=0.5) == []
        assert counts(prefill)["clients without the cluster's key"] > 0


def test_an_asking_worker_does_not_talk_to_a_server_with_another_key() -> None:
    with plane(ANOTHER_KEY) as impostor, plane() as decode:
        decode.send(impostor.endpoint, FETCH)
        assert until(len, impostor, decode, limit_s=0.5) == []


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [os.urandom(1000)],
        [b"\x91" * 100_000],
        [FETCH, FETCH],
        [b"", FETCH],
        [FETCH[:-1]],
        [FETCH + b"\x00"],
        [REFUSED],
    ],
)
def test_what_is_no_question_is_counted_and_dropped(frames: list[bytes]) -> None:
    with plane() as prefill, client(prefill.endpoint) as peer:
        peer.send_multipart(frames)
        peer.send(FETCH)
        assert [message.message for message in until(len, prefill)] == [Fetch(lease=bytes(16), reader="d")]
        assert sum(counts(prefill).values()) == 1


def test_answers_that_are_questions_are_dropped() -> None:
    with plane() as prefill, plane() as decode:
        decode.send(prefill.endpoint, FETCH)
        (question,) = until(len, prefill, decode)
        assert isinstance(question, Question)
        prefill.answer(question, FETCH)
        prefill.answer(question, REFUSED)
        assert until(len, prefill, decode) == [Answer(prefill.endpoint, Refused(reason="no"))]
        assert counts(decode) == {"messages that nothing asked for": 1}


def test_a_huge_message_ends_only_its_connection() -> None:
    with plane() as prefill, client(prefill.endpoint) as peer, client(prefill.endpoint) as other:
        peer.send(bytes(MESSAGE_BYTES_MAX + 1))
        assert until(len, prefill, limit_s=0.3) == []
        other.send(FETCH)
        assert len(until(len, prefill)) == 1


def test_a_huge_message_is_not_sent() -> None:
    with plane() as prefill, plane() as decode:
        decode.send(prefill.endpoint, bytes(MESSAGE_BYTES_MAX + 1))
        decode.send(prefill.endpoint, FETCH)
        assert len(until(len, prefill, decode)) == 1
        assert counts(decode) == {"messages too long to send": 1}


def test_a_flood_is_taken_in_parts() -> None:
    with plane() as prefill, client(prefill.endpoint, sndhwm=0) as peer, client(prefill.endpoint) as other:
        for _ in range(5000):
            peer.send(FETCH)
        until(len, prefill)
        other.send(FETCH)
        started_s, turns, routes = time.monotonic(), 0, set()
        while len(routes) < 2 and time.monotonic() < started_s + 3:
            received = prefill.receive()
            assert len(received) <= MESSAGES_PER_TURN
            routes |= {message.route for message in received if isinstance(message, Question)}
            turns += bool(received)
        assert len(routes) == 2, "a peer that sends little waits behind one that sends much"


def test_messages_to_a_peer_that_is_gone_are_dropped() -> None:
    with plane() as decode:
        for _ in range(QUEUED_MESSAGES_MAX + 10):
            decode.send("127.0.0.1:9", FETCH)
        assert counts(decode) == {"messages lost because too many wait": 10}
        decode.forget("127.0.0.1:9")
        decode.forget("127.0.0.1:9")


def test_connections_that_carry_nothing_are_closed_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "IDLE_S", 0.4)
    with plane() as prefill, plane() as decode:
        decode.send(prefill.endpoint, FETCH)
        until(len, prefill, decode)
        descriptors = num_descriptors()
        for number in range(1, 20):
            decode.send(f"127.0.0.{number}:9", FETCH)
        for _ in range(8):
            time.sleep(0.1)
            decode.send(prefill.endpoint, FETCH)
            decode.close_idle(time.monotonic())
        # The route of a question is that of its connection: one that is used is not closed.
        routes = {
            question.route for question in until(lambda got: len(got) == 8, prefill) if isinstance(question, Question)
        }
        assert len(routes) == 1
        end_s = time.monotonic() + 3.0
        while num_descriptors() > descriptors and time.monotonic() < end_s:
            time.sleep(0.01)
        assert num_descriptors() <= descriptors
        time.sleep(0.4)
        decode.close_idle(time.monotonic())
        decode.send(prefill.endpoint, FETCH)
        (question,) = until(len, prefill, decode)
        assert isinstance(question, Question)
        assert question.route not in routes
        prefill.answer(question, REFUSED)
        assert until(len, prefill, decode) == [Answer(prefill.endpoint, Refused(reason="no"))]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_port_in_use_is_a_mistake_of_the_settings() -> None:
    with plane() as first, pytest.raises(ConfigError, match="kv_port"):
        ControlPlane(KEY, address="127.0.0.1", port=int(first.endpoint.rpartition(":")[2]), complaints=Complaints())


def test_complaints_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    for number in range(100):
        complaints.add("kind", number)
    assert len(caplog.records) == 1
    assert complaints.counts == {"kind": 100}
