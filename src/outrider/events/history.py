"""What was published, for subscribers that come late or missed something: the last batches, and what came before them.

sequence     | before: as one batch, numbered first - 1 | first ... last |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from outrider.events.messages import (
    AllBlocksCleared,
    AnyEvent,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode,
    encode,
)


class History:
    def __init__(self, batches: int) -> None:
        self._most = batches
        self._batches: deque[tuple[int, bytes]] = deque()
        self._before: dict[tuple[int | None, int], BlockStored] = {}
        """Blocks that were announced, and not withdrawn, by batches that are not kept any more. A block stands after
        the one that it follows."""
        self._before_ts = 0.0

    def add(self, sequence: int, payload: bytes) -> None:
        self._batches.append((sequence, payload))
        if len(self._batches) > self._most:
            _sequence, oldest = self._batches.popleft()
            self._fold(decode(oldest))

    def since(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """Yields batches, numbered without a gap, that lead to the present from the state before batch `sequence`, or
        from any state if that batch is not kept any more."""
        if not self._batches:
            return
        first = self._batches[0][0]
        if sequence < first:
            events: list[AnyEvent] = [AllBlocksCleared(), *self._before.values()]
            yield first - 1, encode(EventBatch(ts=self._before_ts, events=events))
        for number, payload in self._batches:
            if number >= sequence:
                yield number, payload

    def _fold(self, batch: EventBatch) -> None:
        self._before_ts = batch.ts
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self._before.clear()
                case BlockRemoved():
                    for value in event.block_hashes:
                        self._before.pop((event.group_idx, value), None)
                case BlockStored():
                    for block in single_blocks(event):
                        self._before[event.group_idx, block.block_hashes[0]] = block


def single_blocks(event: BlockStored) -> Iterator[BlockStored]:
    """Yields an event for each of the blocks."""
    parent, size = event.parent_block_hash, event.block_size
    extra_keys = event.extra_keys or [None] * len(event.block_hashes)
    for place, value in enumerate(event.block_hashes):
        yield BlockStored(
            block_hashes=[value],
            parent_block_hash=parent,
            token_ids=event.token_ids[place * size : (place + 1) * size],
            block_size=size,
            lora_id=event.lora_id,
            medium=event.medium,
            lora_name=event.lora_name,
            extra_keys=None if extra_keys[place] is None else [extra_keys[place]],
            group_idx=event.group_idx,
            kv_cache_spec_kind=event.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
        )
        parent = value
