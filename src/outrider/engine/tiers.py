"""Tiers behind an engine's KV cache, made from its settings."""

from __future__ import annotations

import secrets

from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.kv.layout import KVLayout
from outrider.kv.retention import Retention
from outrider.runner.page_store import PageStore
from outrider.transfer.cache_tier import CacheTier
from outrider.transfer.tiers.copying import MemoryCopier, PageAddresses
from outrider.transfer.tiers.host import HostTier
from outrider.transfer.tiers.sealing import Sealer

SECRET_BYTES = 32


def make_tiers(config: EngineConfig, layout: KVLayout, store: PageStore) -> list[CacheTier]:
    """Returns the tiers that the settings ask for, the nearest first."""
    tiers: list[CacheTier] = []
    if config.kv_offloading_bytes:
        tiers.append(_host_tier(config, layout, store))
    return tiers


def _host_tier(config: EngineConfig, layout: KVLayout, store: PageStore) -> CacheTier:
    page_bytes = tuple(spec.page_bytes for spec in layout.groups)
    if config.kv_offloading_bytes < max(page_bytes):
        raise ConfigError(
            f"kv_offloading_size: {config.kv_offloading_bytes:,} bytes hold no page of {max(page_bytes):,} bytes; give "
            "more, or leave it out"
        )
    if not store.is_in_host_memory:
        raise ConfigError(
            "kv_offloading_size: KV in a GPU's memory cannot be copied to the host's memory yet; use --device cpu, or "
            "leave kv_offloading_size out"
        )
    # No other process reads what this one has written, so the secret need not be known elsewhere.
    copier = MemoryCopier(page_addresses(layout, store), Sealer(secrets.token_bytes(SECRET_BYTES)))
    tier = HostTier(copier, page_bytes=page_bytes, capacity_bytes=config.kv_offloading_bytes)
    return CacheTier(tier, layout, Retention.of(config.kv_offloading_retention))


def page_addresses(layout: KVLayout, store: PageStore) -> PageAddresses:
    memory = store.memory_map()
    arenas = [memory.arenas[group.arena] for group in memory.groups]
    sizes = tuple(group.planes * group.plane_bytes for group in memory.groups)
    assert sizes == tuple(spec.page_bytes for spec in layout.groups), "a page is not in one piece"
    return PageAddresses(
        bases=tuple(arena.base for arena in arenas),
        strides=tuple(arena.page_bytes for arena in arenas),
        page_bytes=sizes,
        owner=store,
    )
