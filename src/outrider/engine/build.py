"""Puts an engine together from its settings: model, drafter, memory, scheduler, runner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.engine.memory import kv_budget_bytes, longest_text, sized, unsized
from outrider.errors import ConfigError
from outrider.kv.footprint import NO_DRAFTER
from outrider.kv.layout import KVConfig, KVLayout
from outrider.kv.manager import KVManager
from outrider.kv.prefix import CacheIdentity
from outrider.kv.retention import Retention
from outrider.layers.select import select_ops
from outrider.layers.torch_threads import torch_threads
from outrider.matching.grammars import COMPILE_LIMIT_S, Grammars
from outrider.matching.native import is_installed
from outrider.matching.tokens import token_table
from outrider.models.decoder import Decoder
from outrider.models.kv_groups import layer_groups
from outrider.models.load import LoadedModel, load_model
from outrider.runner.runner import Runner
from outrider.sanitizer import Mode, Sanitizer
from outrider.sanitizer.checksums import Checksums
from outrider.scheduler import Scheduler, SchedulerConfig
from outrider.speculative.drafter import Drafter
from outrider.speculative.registry import DrafterSettings, load_drafter

CPU_CONFIDENCE = 0.2
"""On a CPU a row more to verify takes about a fifth of what a token takes: below this chance to count, it costs more
than it brings. A GPU verifies a few rows more at no cost."""
CACHED_TEXTS = 64
"""Of memory that nobody named, room is taken for this many texts of the longest length, running or cached."""
PAGE_LAYOUT = "layer, key or value, head, slot"
"""The order of a page's dimensions. Page sizes are not part of it: peers may differ in them."""

Progress = Callable[[str, int, int], None]
"""(what is being done, done, total)"""


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


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def build_engine(
    config: EngineConfig,
    *,
    model: LoadedModel | None = None,
    drafter: Drafter | None = None,
    progress: Progress | None = None,
    grammar_compile_limit_s: float = COMPILE_LIMIT_S,
) -> Engine:
    """Load what `config` names. A model or a drafter that is loaded already may be passed instead."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    ops = select_ops(config.ops, device=device, threads=config.num_threads, progress=progress)
    # Tensors are copied one by one: PyTorch's threads would spend three times as long waiting for each other.
    one_thread = torch_threads(1) if ops.own_threads else nullcontext()
    # Stored numbers are widened to float32: whoever asks for another type gets weights of that type.
    as_stored = ops.reads_stored and dtype == torch.float32 and not config.expand_weights
    if model is None:
        report = None if progress is None else lambda done, total: progress("loading weights", done, total)
        with one_thread:
            model = load_model(config.model, dtype=dtype, device=device, progress=report, as_stored=as_stored)
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
    room = longest_text(alone, unsized(alone, **settings), k=0, budget_bytes=kv_budget_bytes(config, device))
    limit = limit if config.max_model_len is not None else room
    decoder = Decoder(model.spec, model.parameters, ops, max_position=min(limit, room))
    speculation, k, least_confidence = config.speculative_config, 0, 0.0
    if speculation is not None:
        k = speculation.num_speculative_tokens or 0
        if k >= limit:
            raise ConfigError(f"num_speculative_tokens ({k}) must be smaller than the context of {limit} tokens")
        if drafter is None:
            packs = as_stored if speculation.pack_weights is None else speculation.pack_weights
            if packs and not as_stored:
                raise ConfigError(
                    "speculative_config: pack_weights is for CPU kernels that read packed weights, which this engine "
                    "does not use; leave it out"
                )
            drafter_settings = DrafterSettings(
                target=model,
                ops=ops,
                page_tokens=config.block_size,
                dtype=dtype,
                as_stored=as_stored,
                packed=packs,
                draft_vocab_size=speculation.draft_vocab_size,
                most_drafts=speculation.num_speculative_tokens,
                device=device,
                max_model_len=limit,
                progress=progress,
            )
            with one_thread:
                drafter = load_drafter(speculation, drafter_settings)
        k = k or min(drafter.usual_k, limit - 1)
        least_confidence = _least_confidence(speculation, device)
    if drafter is not None and drafter.footprint.block_rows + 2 > config.max_num_batched_tokens:
        raise ConfigError(
            f"a step of max_num_batched_tokens ({config.max_num_batched_tokens}) rows has no room for "
            f"{drafter.footprint.name}: its blocks have {drafter.footprint.block_rows} rows, and a draft takes two to "
            "verify; raise max_num_batched_tokens"
        )
    layout = KVLayout(target=groups.specs, footprint=NO_DRAFTER if drafter is None else drafter.footprint)
    kv_config = _kv_config(config, model, layout, limit, k, device, dtype)
    sanitizer = None
    if config.sanitizer != "off":
        sanitizer = Sanitizer(layout, kv_config, mode=Mode(config.sanitizer))
    manager = KVManager(layout, kv_config, observer=sanitizer)
    if sanitizer is not None:
        sanitizer.bind(manager)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_chunk_tokens=config.max_num_batched_tokens,
        ),
        manager,
    )
    runner = Runner(
        decoder,
        groups,
        drafter,
        layout,
        kv_config,
        kv_dtype=kv_dtype,
        device=device,
        sanitizer=sanitizer,
        least_confidence=least_confidence,
    )
    if sanitizer is not None and config.sanitizer_level == "bytes":
        sanitizer.checksums = Checksums(runner.store.page_bytes)
    grammars = None
    if model.eos_ids and is_installed():
        table = token_table(model.tokenizer, vocab_size=model.spec.vocab_size, eos_ids=model.eos_ids)
        grammars = Grammars(table, device=device, limit_s=grammar_compile_limit_s)
    return Engine(config, model, scheduler, runner, sanitizer=sanitizer, k=k, grammars=grammars)


def _least_confidence(speculation: SpeculativeConfig, device: torch.device) -> float:
    """How likely drafts must be together to be verified."""
    if speculation.draft_confidence is not None:
        return float(speculation.draft_confidence)
    # Whoever names a number of drafts means that number.
    by_itself = speculation.num_speculative_tokens is None
    return CPU_CONFIDENCE if by_itself and device.type == "cpu" else 0.0


def _kv_config(
    config: EngineConfig,
    model: LoadedModel,
    layout: KVLayout,
    limit: int,
    k: int,
    device: torch.device,
    dtype: torch.dtype,
) -> KVConfig:
    budget = kv_budget_bytes(config, device)
    kv_config = unsized(
        layout,
        identity=CacheIdentity(weights=model.fingerprint, dtype=str(dtype), layout=PAGE_LAYOUT),
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


def _most_tokens(config: EngineConfig, longest: int, layout: KVLayout) -> int | None:
    """Tokens of texts beyond which memory would serve nothing; None: there is no such number."""
    texts = config.max_num_seqs
    if config.enable_prefix_caching:
        if config.kv_cache_memory_bytes is not None:
            return None
        texts = max(texts, CACHED_TEXTS)
    # Each request may hold a partly used page and copies at its ends.
    return texts * (longest + 4 * layout.alignment)
