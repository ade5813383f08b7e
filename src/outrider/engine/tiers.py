"""Tiers behind an engine's KV cache, made from its settings."""

from __future__ import annotations

import logging
import secrets

from outrider.config import EngineConfig, KVStoreConfig
from outrider.errors import ConfigError, TransferError
from outrider.kv.layout import KVLayout
from outrider.kv.retention import Retention
from outrider.runner.page_store import PageStore
from outrider.transfer.cache_tier import CacheTier
from outrider.transfer.tickets import ClusterKey
from outrider.transfer.tiers.copying import MemoryCopier, PageAddresses
from outrider.transfer.tiers.host import HostTier
from outrider.transfer.tiers.mooncake import MooncakeTier, stage_bytes
from outrider.transfer.tiers.sealing import Sealer
from outrider.transfer.tiers.store_messages import SetUp
from outrider.transfer.tiers.store_process import StoreProcess

logger = logging.getLogger("outrider.transfer")

SECRET_BYTES = 32
WAIT_LIMIT_S = 5.0
"""How long the start of an engine waits for a store; after that, it goes on without one until the store is there."""


def make_tiers(config: EngineConfig, layout: KVLayout, store: PageStore) -> list[CacheTier]:
    """Returns the tiers that the settings ask for, the nearest first."""
    tiers: list[CacheTier] = []
    if config.kv_offloading_bytes:
        tiers.append(_host_tier(config, layout, store))
    if config.kv_store_config is not None:
        tiers.append(_store_tier(config.kv_store_config, layout, store))
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


def _store_tier(config: KVStoreConfig, layout: KVLayout, store: PageStore) -> CacheTier:
    if not store.is_in_host_memory:
        raise ConfigError(
            "kv_store_config: KV in a GPU's memory cannot be copied to a store yet; use --device cpu, or leave "
            "kv_store_config out"
        )
    addresses, sealer = page_addresses(layout, store), Sealer(store_secret(config))
    process = store_process(config, addresses.page_bytes)
    try:
        process.wait_ready(WAIT_LIMIT_S)
    except TransferError as problem:
        if process.is_hopeless:
            process.close()
            raise ConfigError(f"kv_store_config: {problem}") from None
        # It may come back at any time, and everything is a miss until then.
        logger.warning("the KV store is away: %s", problem)
    tier = MooncakeTier(addresses, sealer, process)
    return CacheTier(tier, layout, Retention.of(config.kv_retention))


def store_process(config: KVStoreConfig, page_bytes: tuple[int, ...]) -> StoreProcess:
    return StoreProcess(
        SetUp(
            local_hostname=config.local_hostname,
            metadata_server=config.metadata_server,
            global_segment_size=config.global_segment_size,
            local_buffer_size=config.local_buffer_size,
            protocol=config.protocol,
            device_name=config.device_name,
            master_server_address=config.master_server_address,
            replica_num=config.replica_num,
            stage_bytes=stage_bytes(page_bytes),
        )
    )


def store_secret(config: KVStoreConfig) -> bytes:
    """Returns what pages in the store are sealed under, the same for all workers of a cluster."""
    if config.cluster_key is None:
        raise ConfigError(
            "kv_store_config needs a cluster key, the same for all workers: pages in the store are sealed under it; "
            "give --cluster-key @FILE, or cluster_key in Python"
        )
    return ClusterKey(config.cluster_key).derive("pages in a store")


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
