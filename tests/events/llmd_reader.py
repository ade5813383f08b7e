"""A subscriber to KV events written after the rules of llm-d's router, with nothing of Outrider's in it.

Rules: a live message is [topic, 8-byte sequence, msgpack], the topic kv@POD@MODEL; a gap is filled from the replay
address, whose answers may begin later than asked for, and then replace everything known; only groups of full attention
are indexed, and only spans in which each hash has a block of tokens; a store whose parent is unknown is dropped;
removals of groups that are not indexed are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

INDEXED_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
Text = tuple[Any, ...]
"""A prefix as its salt and then its tokens."""


@dataclass
class Reader:
    endpoint: str
    replay_endpoint: str | None = None
    texts: dict[int, Text] = field(default_factory=dict)
    """The text that ends with each indexed block, by its hash."""
    kinds: dict[int, str] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    """Hashes that are stored, by group, of groups that are not indexed."""
    skipped: dict[int, set[int]] = field(default_factory=dict)
    last: int | None = None
    topics: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(self.endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self, quiet_ms: int = 300) -> None:
        """Take in what comes until nothing comes any more."""
        while self._socket.poll(quiet_ms):
            topic, sequence_bytes, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(sequence_bytes, "big")
            if self.last is not None and sequence <= self.last:
                continue
            if sequence != (0 if self.last is None else self.last + 1):
                self.replay()
                continue
            self._take(topic, sequence, payload)

    def replay(self) -> None:
        assert self.replay_endpoint is not None
        wanted = 0 if self.last is None else self.last + 1
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(self.replay_endpoint)
        dealer.send_multipart([b"", wanted.to_bytes(8, "big")])
        first = True
        while True:
            assert dealer.poll(90_000), "the replay does not end"
            empty, topic, sequence_bytes, payload = dealer.recv_multipart()
            assert empty == b""
            if payload == b"":
                assert int.from_bytes(sequence_bytes, "big", signed=True) == -1
                break
            sequence = int.from_bytes(sequence_bytes, "big")
            if first and sequence > wanted:
                self.texts.clear()
                self.skipped.clear()
            elif not first or sequence != wanted:
                assert self.last is not None
                assert sequence == self.last + 1, "a replay has no gaps"
            first = False
            self._take(topic, sequence, payload)
        dealer.close()

    def _take(self, topic: bytes, sequence: int, payload: bytes) -> None:
        self.last = sequence
        self.topics.add(topic.decode())
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(timestamp, float)
        assert rank == 0
        for event in events:
            getattr(self, "_" + event["type"])(event)

    def _AllBlocksCleared(self, _event: dict[str, Any]) -> None:  # noqa: N802
        self.texts.clear()
        self.skipped.clear()

    def _BlockStored(self, event: dict[str, Any]) -> None:  # noqa: N802
        group, hashes, tokens, size = (event[n] for n in ("group_idx", "block_hashes", "token_ids", "block_size"))
        self.kinds[group] = event["kv_cache_spec_kind"]
        if len(tokens) % size or len(tokens) // size != len(hashes):
            self.problems.append(f"a span of {len(tokens)} tokens has {len(hashes)} hashes")
            return
        if event["kv_cache_spec_kind"] not in INDEXED_KINDS:
            self.windows[group] = event["kv_cache_spec_sliding_window"]
            known = self.skipped.setdefault(group, set())
            if not known.isdisjoint(hashes):
                self.problems.append("a block of a window is stored twice")
            known.update(hashes)
            return
        parent = event["parent_block_hash"]
        if parent is not None and parent not in self.texts:
            self.problems.append(f"the parent {parent} is not known")
            return
        extra = (event.get("extra_keys") or [None])[0]
        text: Text = (tuple(extra) if extra else (),) if parent is None else self.texts[parent]
        for place, value in enumerate(hashes):
            text = (*text, *tokens[place * size : (place + 1) * size])
            if value in self.texts:
                self.problems.append(f"block {value} is stored twice")
            self.texts[value] = text

    def _BlockRemoved(self, event: dict[str, Any]) -> None:  # noqa: N802
        indexed = self.kinds.get(event["group_idx"]) in INDEXED_KINDS
        known = self.texts if indexed else self.skipped.setdefault(event["group_idx"], set())
        for value in event["block_hashes"]:
            if value not in known:
                self.problems.append(f"block {value} is removed and was not stored")
            elif indexed:
                del self.texts[value]
            else:
                self.skipped[event["group_idx"]].discard(value)
