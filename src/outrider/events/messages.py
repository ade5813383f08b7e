"""KV events as vLLM writes them: a batch is an array [time, events, rank], an event a map with its `type`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from outrider.events.servable import Changes, ServablePage
from outrider.kv.footprint import GroupSpec
from outrider.kv.layout import KVLayout

MEDIUM = "GPU"
"""vLLM's word for the memory that the engine computes in, whichever device that is."""


class Event(msgspec.Struct, tag=True, tag_field="type", omit_defaults=True, kw_only=True, gc=False):
    """One change of what is cached."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before the first of these; None where they begin their text."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """The cache salt, beside the first block of a text that has one. The hashes of all its blocks depend on it."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None = MEDIUM
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[AnyEvent]
    data_parallel_rank: int | None = 0


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(EventBatch).decode


def block_hash(base: bytes) -> int:
    """Returns what routers know a page by: 63 bits of the chain's base at its end, so that it fits a signed number."""
    return int.from_bytes(base[:8], "big") >> 1


def tokens_of(content: bytes) -> list[int]:
    tokens = array("i")
    tokens.frombytes(content)
    return tokens.tolist()


def events_of(changes: Changes, layout: KVLayout) -> list[AnyEvent]:
    """Returns the events that tell a router of the changes."""
    events: list[AnyEvent] = [AllBlocksCleared()] if changes.cleared else []
    removed: dict[int, list[int]] = {}
    for group, key in changes.removed:
        removed.setdefault(group, []).append(block_hash(key))
    events += [BlockRemoved(block_hashes=hashes, group_idx=group) for group, hashes in removed.items()]
    events += [_stored(run, layout.groups[run[0].group]) for run in _runs(changes.stored)]
    return events


def _runs(pages: Iterable[ServablePage]) -> list[list[ServablePage]]:
    """Joins pages, sorted by their position, that follow each other."""
    runs: list[list[ServablePage]] = []
    ending: dict[tuple[int, bytes], list[ServablePage]] = {}
    """The run that ends with a page, by the page's group and key."""
    for page in pages:
        run = None if page.parent is None else ending.pop((page.group, page.parent), None)
        if run is None:
            run = []
            runs.append(run)
        run.append(page)
        ending[page.group, page.key] = run
    return runs


def _stored(run: list[ServablePage], spec: GroupSpec) -> BlockStored:
    first = run[0]
    adapter, salt = first.namespace
    window = spec.kind.freed_at(1)
    begins = first.parent is None
    return BlockStored(
        block_hashes=[block_hash(page.key) for page in run],
        parent_block_hash=None if first.parent is None else block_hash(first.parent),
        token_ids=tokens_of(b"".join(page.content for page in run)),
        block_size=spec.page_tokens,
        lora_name=adapter or None,
        extra_keys=[(salt,) if place == 0 else None for place in range(len(run))] if salt and begins else None,
        group_idx=first.group,
        kv_cache_spec_kind="sliding_window" if spec.kind.slides else "full_attention",
        kv_cache_spec_sliding_window=window,
    )
