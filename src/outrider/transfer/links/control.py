"""Control messages between workers over ZMQ, for members of the cluster only.

    ROUTER   bound; receives the questions of peers, and sends the answers
    DEALER   one for each peer that is asked; receives the answers
    REP      libzmq asks here, once per connection, whether a client's key is known (ZAP, RFC 27)

Connections are encrypted and authenticated both ways with CURVE. All workers derive the same two key pairs from the
cluster's key; a peer without it gets no answer at all. Everything here belongs to the thread that made it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import NamedTuple

import zmq
from zmq.utils import z85

from outrider.errors import ConfigError, TransferError
from outrider.transfer.messages import (
    MESSAGE_BYTES_MAX,
    Confirm,
    Confirmed,
    Fetch,
    Hello,
    Message,
    Offered,
    Refused,
    Release,
    Renew,
    Welcome,
    decode,
)
from outrider.transfer.tickets import ClusterKey

QUESTIONS = (Hello, Fetch, Renew, Confirm, Release)
ANSWERS = (Welcome, Offered, Confirmed, Refused)
QUEUED_MESSAGES_MAX = 256
"""Largest number of messages that wait for one peer or from one peer; more are lost, which every message may be."""
MESSAGES_PER_TURN = 64
"""Largest number of messages that are taken from a socket before the thread looks after its transfers again."""
LINGER_MS = 100
"""Time in which the last messages to a peer may still leave after it was forgotten, or when all ends: they release its
leases."""
IDLE_S = 600.0
"""Time after its last message in which the connection to a peer is kept. The driver forgets peers that it has met;
others get messages too, such as a release of KV that is not needed."""
COMPLAINT_INTERVAL_S = 10.0
logger = logging.getLogger("outrider.transfer")


class Complaints:
    """Counts what is wrong, and logs each kind of it at most once in an interval: a peer must not fill the log."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._next_s: dict[str, float] = {}

    def add(self, kind: str, detail: object) -> None:
        self.counts[kind] += 1
        now_s = time.monotonic()
        if now_s >= self._next_s.get(kind, 0.0):
            self._next_s[kind] = now_s + COMPLAINT_INTERVAL_S
            logger.warning("transfer link: %s (%d so far): %s", kind, self.counts[kind], detail)


class KeyPair(NamedTuple):
    public: bytes
    secret: bytes

    @classmethod
    def derive(cls, key: ClusterKey, purpose: str) -> KeyPair:
        secret = z85.encode(key.derive(purpose))
        return cls(zmq.curve_public(secret), secret)


class Question(NamedTuple):
    """A message of a peer, and where its answer goes."""

    route: bytes
    message: Message


class Answer(NamedTuple):
    peer: str
    message: Message


class ControlPlane:
    def __init__(self, key: ClusterKey, *, address: str, port: int, complaints: Complaints) -> None:
        if not zmq.has("curve"):
            raise ConfigError("this build of ZMQ has no CURVE encryption; install pyzmq from its wheels")
        self._complaints = complaints
        self._server = KeyPair.derive(key, "control server")
        self._client = KeyPair.derive(key, "control client")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._used_s: dict[str, float] = {}
        """When each dealer last sent or received a message."""
        try:
            self._keeper = self._context.socket(zmq.REP)
            self._keeper.linger = 0
            # Without this handler in place, libzmq lets every client in.
            self._keeper.bind("inproc://zeromq.zap.01")
            self._poller.register(self._keeper, zmq.POLLIN)
            self._router = self._new_socket(zmq.ROUTER)
            self._router.curve_server = True
            self._router.zap_domain = b"outrider"
            self._router.curve_publickey, self._router.curve_secretkey = self._server
            self._router.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv_ip, kv_port: cannot listen on {address}:{port} ({error}); choose another") from error
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = f"{address}:{bound.rpartition(':')[2]}"

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.linger = 0
        made.sndhwm = made.rcvhwm = QUEUED_MESSAGES_MAX
        made.maxmsgsize = MESSAGE_BYTES_MAX
        # Tells a peer whose machine is gone from one that has nothing to say.
        made.heartbeat_ivl, made.heartbeat_timeout = 2_000, 6_000
        made.reconnect_ivl, made.reconnect_ivl_max = 50, 1_000
        self._poller.register(made, zmq.POLLIN)
        return made

    def watch(self, descriptor: int) -> None:
        """End `wait` when this descriptor is readable, too."""
        self._poller.register(descriptor, zmq.POLLIN)

    def send(self, peer: str, frame: bytes) -> None:
        """Send a question; it is lost if too many are waiting already."""
        dealer = self._dealers.get(peer) or self._connect(peer)
        self._used_s[peer] = time.monotonic()
        self._send(dealer, [frame], peer)

    def answer(self, question: Question, frame: bytes) -> None:
        self._send(self._router, [question.route, frame], "a peer")

    def _send(self, sender: zmq.Socket[bytes], frames: list[bytes], peer: str) -> None:
        if len(frames[-1]) > MESSAGE_BYTES_MAX:
            self._complaints.add("messages too long to send", f"{len(frames[-1]):,} bytes for {peer}")
            return
        try:
            sender.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._complaints.add("messages lost because too many wait", peer)

    def _connect(self, peer: str) -> zmq.Socket[bytes]:
        dealer = self._new_socket(zmq.DEALER)
        try:
            dealer.curve_serverkey = self._server.public
            dealer.curve_publickey, dealer.curve_secretkey = self._client
            dealer.connect(f"tcp://{peer}")
        except zmq.ZMQError as error:
            self._poller.unregister(dealer)
            dealer.close()
            raise TransferError(f"cannot connect to {peer}: {error}") from error
        self._dealers[peer] = dealer
        return dealer

    def forget(self, peer: str) -> None:
        dealer = self._dealers.pop(peer, None)
        self._used_s.pop(peer, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close(linger=LINGER_MS)

    def close_idle(self, now_s: float) -> None:
        """Close connections that have carried nothing for long: a cluster whose workers change must not fill this one
        with connections. The next message to a peer connects again."""
        for peer in [peer for peer, used_s in self._used_s.items() if now_s - used_s >= IDLE_S]:
            self.forget(peer)

    def wait(self, limit_s: float) -> None:
        """Sleep until a message has come or a watched descriptor is readable."""
        self._poller.poll(int(limit_s * 1e3))

    def receive(self) -> list[Question | Answer]:
        """Returns the next messages, in bounded number; what is none is counted and dropped."""
        ready = {found for found, _ in self._poller.poll(0)}
        messages: list[Question | Answer] = []
        if self._keeper in ready:
            self._admit_clients()
        if self._router in ready:
            for frames in self._take(self._router):
                if len(frames) == 2 and (message := self._decoded(frames[1], QUESTIONS)) is not None:
                    messages.append(Question(frames[0], message))
        for peer, dealer in self._dealers.items():
            if dealer in ready:
                self._used_s[peer] = time.monotonic()
                for frames in self._take(dealer):
                    if len(frames) == 1 and (message := self._decoded(frames[0], ANSWERS)) is not None:
                        messages.append(Answer(peer, message))
        return messages

    def _take(self, receiver: zmq.Socket[bytes]) -> list[list[bytes]]:
        taken: list[list[bytes]] = []
        expected = 2 if receiver is self._router else 1
        try:
            while len(taken) < MESSAGES_PER_TURN:
                frames = receiver.recv_multipart(zmq.NOBLOCK)
                taken.append(frames)
                if len(frames) != expected:
                    self._complaints.add("messages in several parts", f"{len(frames)} parts")
        except zmq.Again:
            pass
        return taken

    def _decoded(self, frame: bytes, kinds: tuple[type[Message], ...]) -> Message | None:
        try:
            message = decode(frame)
        except TransferError as error:
            self._complaints.add("frames that are no messages", error)
            return None
        if not isinstance(message, kinds):
            self._complaints.add("messages that nothing asked for", type(message).__name__)
            return None
        return message

    def _admit_clients(self) -> None:
        """Answer libzmq's questions about clients that connect: those with the cluster's key come in."""
        known = z85.decode(self._client.public)
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._keeper.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request, _domain, address, _identity, mechanism, *credentials = frames
            good = version == b"1.0" and mechanism == b"CURVE" and credentials == [known]
            if not good:
                self._complaints.add("clients without the cluster's key", address.decode("ascii", "replace"))
            status = [b"200", b"OK", b"member"] if good else [b"400", b"the key is not this cluster's", b""]
            self._keeper.send_multipart([b"1.0", request, *status, b""])

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)
