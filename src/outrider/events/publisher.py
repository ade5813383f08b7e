"""Sends KV events over ZMQ, from a thread of its own: the engine only hands over notes after its steps.

PUB      [topic, sequence, batch]                       a sequence is 8 bytes, the highest first
ROUTER   ["", first sequence] is answered by ["", topic, sequence, batch] ..., ["", "", -1, ""]
"""

from __future__ import annotations

import logging
import socket as network
import time
from itertools import count

import zmq

from outrider.errors import ConfigError
from outrider.events.config import KVEventsConfig
from outrider.events.history import History
from outrider.events.messages import AllBlocksCleared, AnyEvent, EventBatch, encode, events_of
from outrider.events.servable import ServablePages
from outrider.events.stream import EventStream
from outrider.kv.layout import KVLayout

logger = logging.getLogger("outrider.events")

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


def default_topic(model: str) -> str:
    """Returns the topic under which routers expect the events of a server of this model."""
    return f"kv@{network.gethostname()}@{model}"


class ZmqEvents:
    """Publishes the events of one engine."""

    def __init__(self, layout: KVLayout, config: KVEventsConfig, *, topic: str) -> None:
        self._layout = layout
        self._topic = topic.encode()
        self._history = History(config.buffer_steps)
        self._sequences = count()
        self.stream = EventStream(layout, queue_size=config.max_queue_size)
        self._context = zmq.Context()
        self._publisher: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._publisher.set_hwm(config.hwm)
            _open(self._publisher, config.endpoint, bind=config.binds)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.set_hwm(0)
                _open(self._replay, config.replay_endpoint, bind=True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        # Subscribers may still know what an earlier process at this address had cached.
        self._publish([AllBlocksCleared()])
        self.stream.start(self._run)

    @property
    def pages(self) -> ServablePages:
        return self.stream.pages

    def flush(self) -> None:
        self.stream.flush()

    def close(self) -> None:
        self.stream.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.stream.file, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            try:
                poller.poll()
                waiting = self.stream.waiting()
                if waiting is None:
                    return
                for changes in waiting:
                    if changes:
                        self._publish(events_of(changes, self._layout))
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
            except zmq.ZMQError:
                if self._context.closed:
                    return
                logger.exception("KV events could not be sent")
                time.sleep(0.1)

    def _publish(self, events: list[AnyEvent]) -> None:
        sequence, payload = next(self._sequences), encode(EventBatch(ts=time.time(), events=events))
        self._history.add(sequence, payload)
        self._publisher.send_multipart((self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) not in (2, 3) or len(frames[-1]) != SEQUENCE_BYTES:
            logger.warning("a replay request was ignored: it must be 8 bytes, the first sequence, after an empty frame")
            return
        prefix = frames[:-1]
        for sequence, payload in self._history.since(int.from_bytes(frames[-1], "big")):
            replay.send_multipart((*prefix, self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload))
        replay.send_multipart((*prefix, b"", END_OF_REPLAY, b""))


def _open(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> None:
    try:
        socket.bind(endpoint) if bind else socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv_events_config: cannot open {endpoint}: {error.strerror}; another process may use the port, or the "
            "address is not this machine's"
        ) from None
