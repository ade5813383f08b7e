"""What Dynamo's router is told about a worker's cache: the pages of one group that can serve a hit."""

from __future__ import annotations

import logging
import selectors
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from outrider.events.messages import BlockRemoved, BlockStored, block_hash, events_of
from outrider.events.servable import Changes, ServablePages
from outrider.events.stream import EventStream
from outrider.kv.layout import KVLayout

logger = logging.getLogger("outrider.worker")


class Publisher(Protocol):
    """Dynamo's publisher of KV events, as far as it is used."""

    def publish_batch(self, events: Sequence[dict[str, Any]]) -> None: ...


class RouterEvents:
    """The events of one engine. They wait until Dynamo has a publisher."""

    def __init__(self, layout: KVLayout, group: int) -> None:
        self._layout = layout
        self._group = group
        self._stream = EventStream(layout)
        self._told: set[int] = set()
        """Hashes of the pages that the router knows."""

    @property
    def pages(self) -> ServablePages:
        return self._stream.pages

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    def start(self, publisher: Publisher) -> None:
        """Publish from now on, in a thread."""
        self._stream.start(lambda: self._run(publisher))

    def _run(self, publisher: Publisher) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._stream.file, selectors.EVENT_READ)
        while True:
            selector.select()
            waiting = self._stream.waiting()
            if waiting is None:
                return
            for changes in waiting:
                events = list(self._events(changes))
                if not events:
                    continue
                try:
                    publisher.publish_batch(events)
                except Exception:
                    logger.exception("the router could not be told about %d changes of the cache", len(events))

    def _events(self, changes: Changes) -> Iterator[dict[str, Any]]:
        if changes.cleared and self._told:
            yield {"type": "removed", "block_hashes": list(self._told)}
            self._told.clear()
        salts = {block_hash(page.key): page.namespace[1] for page in changes.stored}
        for event in events_of(changes, self._layout):
            if getattr(event, "group_idx", None) != self._group:
                continue
            match event:
                case BlockRemoved():
                    for value in event.block_hashes:
                        self._told.discard(value)
                    yield {"type": "removed", "block_hashes": event.block_hashes}
                case BlockStored():
                    salt = salts[event.block_hashes[0]]
                    self._told.update(event.block_hashes)
                    yield {
                        "type": "stored",
                        "token_ids": event.token_ids,
                        "num_block_tokens": [event.block_size] * len(event.block_hashes),
                        "block_hashes": event.block_hashes,
                        "parent_hash": event.parent_block_hash,
                        "lora_name": event.lora_name,
                        "cache_salt": salt or None,
                    }
