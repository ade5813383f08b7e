"""Puts an engine together from its settings: model, drafter, memory, scheduler, runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from outrider.backends import Progress
from outrider.backends.base import Backend
from outrider.backends.registry import select_backend
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.engine.memory import kv_budget_bytes, longest_text, sized, unsized
from outrider.engine.tiers import make_tiers
from outrider.engine.transfers import EngineTransfers, check_transfer_config, load_failure_of, role_of
from outrider.errors import ConfigError
from outrider.events.publisher import ZmqEvents, default_topic
from outrider.events.stream import KVEvents, Together
from outrider.kv.footprint import NO_DRAFTER, KVFootprint, Proposing
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.manager import KVManager
from outrider.kv.prefix import CacheIdentity
from outrider.kv.retention import Retention
from outrider.models.decoder import Decoder
from outrider.models.kv_groups import layer_groups
from outrider.models.load import LoadedModel, load_model
from outrider.runner.runner import Runner
from outrider.sanitizer import Mode, Sanitizer
from outrider.sanitizer.checksums import Checksums
from outrider.scheduler import Scheduler, SchedulerConfig
from outrider.scheduler.pacing.pacer import Pacer
from outrider.speculative.drafter import Drafter
from outrider.speculative.lookup import Lookup, LookupConfig
from outrider.speculative.registry import load_drafter
from outrider.speculative.settings import DrafterSettings
from outrider.structured.grammars import Grammars, is_installed
from outrider.structured.tokens import token_table

CACHED_TEXTS = 64
"""Number of texts of the longest length, running or cached, that the default KV memory has room for."""
MOST_LOOKED_UP = 15
"""Most drafts that are looked up for a request and a step. They cost no pass, only the rows that verify them."""
PAGE_LAYOUT = "layer, key or value, head, slot"
"""The order of a page's dimensions. Page sizes are not part of it: peers may differ in them."""


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but PyTorch sees no CUDA device; use cpu")
    return device


def resolve_dtype(name: str, backend: Backend) -> torch.dtype:
    if name == "auto":
        return backend.default_dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def build_engine(
    config: EngineConfig,
    *,
    model: LoadedModel | None = None,
    drafter: Drafter | None = None,
    progress: Progress | None = None,
    events: Callable[[KVLayout], KVEvents] | None = None,
) -> Engine:
    """Loads what `config` names. A model or a drafter that is loaded already may be passed instead. `events` makes what
    is told about the prefix cache, beside the publisher that the settings ask for."""
    check_transfer_config(config.kv_transfer_config)
    device = resolve_device(config.device)
    backend = select_backend(config.backend, device=device, threads=config.num_threads, progress=progress)
    dtype = resolve_dtype(config.dtype, backend)
    forms = backend.weight_forms(dtype, expand=config.expand_weights)
    if model is None:
        report = None if progress is None else lambda done, total: progress("loading weights", done, total)
        with backend.exclusive_threads():
            model = load_model(config.model, dtype=dtype, device=device, progress=report, forms=forms)
    if model.parameters.embedding.device.type != device.type:
        raise ConfigError(
            f"the model lies on {model.parameters.embedding.device}, but the engine is to run on {device}; "
            "load it there"
        )
    limit = min(config.max_model_len or model.spec.max_position, model.spec.max_position)
    if config.max_model_len is not None and config.max_model_len > model.spec.max_position:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds what the model was trained for ({model.spec.max_position})"
        )
    kv_dtype = dtype
    groups = layer_groups(
        model.spec,
        owner="target",
        page_tokens=config.block_size,
        item_bytes=kv_dtype.itemsize,
        one_arena=True,
    )
    # A file may promise any length: tables are made for what the memory can hold.
    alone = KVLayout(target=groups.specs)
    settings = {"step_tokens": config.max_num_batched_tokens, "max_model_len": limit}
    room = longest_text(alone, unsized(alone, **settings), k=0, budget_bytes=kv_budget_bytes(config, backend))
    limit = limit if config.max_model_len is not None else room
    decoder = Decoder(model.spec, model.parameters, backend, max_position=min(limit, room))
    speculation, k, least_confidence, pacer, lookup = config.speculative_config, 0, 0.0, None, None
    if speculation is not None:
        k = speculation.num_speculative_tokens or 0
        if k >= limit:
            raise ConfigError(f"num_speculative_tokens ({k}) must be smaller than the context of {limit} tokens")
        if drafter is None:
            can_pack = backend.compacts and dtype == torch.float32 and not config.expand_weights
            packs = can_pack if speculation.pack_weights is None else speculation.pack_weights
            if packs and not can_pack:
                raise ConfigError(
                    "speculative_config: pack_weights is for CPU kernels that read packed weights, which this engine "
                    "does not use; leave it out"
                )
            drafter_settings = DrafterSettings(
                target=model,
                backend=backend,
                page_tokens=config.block_size,
                dtype=dtype,
                forms=forms,
                packed=packs,
                draft_vocab_size=speculation.draft_vocab_size,
                most_drafts=speculation.num_speculative_tokens,
                device=device,
                max_model_len=limit,
                progress=progress,
            )
            with backend.exclusive_threads():
                drafter = load_drafter(speculation, drafter_settings)
        k = k or min(drafter.default_k, limit - 1)
        least_confidence = float(speculation.draft_confidence or 0.0)
        if speculation.chooses:
            lookup = _lookup(speculation, drafter)
            pacer = Pacer(
                drafter.footprint,
                sizes=() if drafter.lookup is not None else _sizes(drafter.footprint, k),
                lookup=0 if lookup is None else min(MOST_LOOKED_UP, limit - 1),
            )
    # Where no sizes are declared, fewer drafts take fewer rows, down to none.
    smallest = next(iter(drafter.footprint.block_sizes), 0) if drafter is not None else 0
    if drafter is not None and 0 < smallest > config.max_num_batched_tokens - 2:
        raise ConfigError(
            f"a step of max_num_batched_tokens ({config.max_num_batched_tokens}) rows has no room for "
            f"{drafter.footprint.name}: its blocks have {smallest} rows, and a draft takes two "
            "to verify; raise max_num_batched_tokens"
        )
    layout = KVLayout(target=groups.specs, footprint=NO_DRAFTER if drafter is None else drafter.footprint)
    kv_config = _kv_config(config, model, layout, limit, k, backend, dtype)
    sanitizer = None
    if config.sanitizer != "off":
        sanitizer = Sanitizer(layout, kv_config, mode=Mode(config.sanitizer))
    runner = Runner(
        decoder,
        groups,
        drafter,
        layout,
        kv_config,
        kv_dtype=kv_dtype,
        sanitizer=sanitizer,
        least_confidence=least_confidence,
        calibration=None if pacer is None else pacer.calibration,
        lookup=lookup,
    )
    tiers = make_tiers(config, layout, runner.store)
    told = _told_about_the_cache(config, layout, model.name, events)
    listener = None if told is None else told.pages
    manager = KVManager(layout, kv_config, observer=sanitizer, tiers=tiers, listener=listener)
    if sanitizer is not None:
        sanitizer.bind(manager)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_chunk_tokens=config.max_num_batched_tokens,
            role=role_of(config.kv_transfer_config),
            load_failure=load_failure_of(config.kv_transfer_config),
        ),
        manager,
        pacer=pacer,
    )
    if sanitizer is not None and config.sanitizer_level == "bytes":
        sanitizer.checksums = Checksums(runner.store.page_bytes)
    grammars = None
    if model.eos_ids and is_installed():
        table = token_table(model.tokenizer, vocab_size=model.spec.vocab_size, eos_ids=model.eos_ids)
        grammars = Grammars(table, device=device)
    transfers = None
    if config.kv_transfer_config is not None or tiers:
        compare_bytes = config.sanitizer != "off" and config.sanitizer_level == "bytes"
        transfers = EngineTransfers(
            config.kv_transfer_config,
            scheduler,
            runner.store,
            vocab_size=model.spec.vocab_size,
            tiers=tiers,
            sanitizer=sanitizer,
            compare_bytes=compare_bytes,
        )
    return Engine(
        config,
        model,
        scheduler,
        runner,
        sanitizer=sanitizer,
        k=k,
        grammars=grammars,
        transfers=transfers,
        events=told,
    )


def _told_about_the_cache(
    config: EngineConfig, layout: KVLayout, model: str, events: Callable[[KVLayout], KVEvents] | None
) -> KVEvents | None:
    members: list[KVEvents] = [] if events is None else [events(layout)]
    published = config.kv_events_config
    if published is not None and published.publishes:
        members.append(ZmqEvents(layout, published, topic=published.topic or default_topic(model)))
    return Together(members) if members else None


def _lookup(speculation: SpeculativeConfig, drafter: Drafter) -> Lookup | None:
    """Returns what finds drafts beside the drafter, or in its place if that is all it does."""
    return None if speculation.lookup is False else Lookup(drafter.lookup or LookupConfig())


def _sizes(footprint: KVFootprint, most: int) -> tuple[int, ...]:
    """Returns the numbers of drafts among which a pacer chooses: where fewer drafts take less time."""
    if footprint.proposing is Proposing.CHAIN:
        return tuple(range(1, most + 1))
    return tuple(sorted({most, *(rows - 1 for rows in footprint.block_sizes if 1 < rows <= most)}))


def _kv_config(
    config: EngineConfig,
    model: LoadedModel,
    layout: KVLayout,
    limit: int,
    k: int,
    backend: Backend,
    dtype: torch.dtype,
) -> KVConfig:
    budget = kv_budget_bytes(config, backend)
    transfer = config.kv_transfer_config
    kv_config = unsized(
        layout,
        identity=CacheIdentity(weights=model.fingerprint, dtype=_arithmetic(config, dtype), layout=PAGE_LAYOUT),
        keep_margin=layout.margin if transfer is not None and transfer.hands_over else 0,
        prefix_caching=config.enable_prefix_caching,
        retention=Retention.of(config.kv_retention),
        max_model_len=limit,
        step_tokens=config.max_num_batched_tokens,
    )
    longest = longest_text(layout, kv_config, k=k, budget_bytes=budget)
    if longest < limit:
        if config.max_model_len is not None:
            raise ConfigError(
                f"the memory for KV ({budget:,} bytes) holds a text of {longest} tokens, fewer than max_model_len "
                f"({config.max_model_len}); raise kv_cache_memory_bytes or lower max_model_len"
            )
        kv_config = replace(kv_config, max_model_len=longest)
    most_tokens = _most_tokens(config, longest, layout)
    return sized(layout, kv_config, k=k, budget_bytes=budget, most_tokens=most_tokens)


def _arithmetic(config: EngineConfig, dtype: torch.dtype) -> str:
    """Returns what a slot's bytes depend on besides weights and layout: weights that are converted to float32 give
    other last bits than weights that are read as they are stored."""
    return f"{dtype}, expanded weights" if config.expand_weights else str(dtype)


def _most_tokens(config: EngineConfig, longest: int, layout: KVLayout) -> int | None:
    """Tokens of texts beyond which memory would serve nothing; None: there is no such number."""
    texts = config.max_num_seqs
    if config.enable_prefix_caching:
        if config.kv_cache_memory_bytes is not None:
            return None
        texts = max(texts, CACHED_TEXTS)
    # Each request may hold a partly used page and copies at its ends.
    return texts * (longest + 4 * layout.alignment)
