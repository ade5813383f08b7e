"""Facts and figures about an engine, for the front end."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict
from typing import Any

from outrider.engine.engine import Engine
from outrider.kv.census import take_census
from outrider.server.messages import (
    ArenaPages,
    Counters,
    Facts,
    GroupPageCounts,
    LookupFigures,
    Pages,
    RecentHit,
    Speculation,
    TextFacts,
    TierFigures,
    TransferFacts,
    Transfers,
)

TRANSFER_COUNTERS = (
    "handed_over",
    "hand_overs_refused",
    "leases_expired",
    "fetches",
    "fetch_failures",
    "draft_groups_missing",
    "recomputed_prompts",
    "transferred_bytes",
    "fences",
    "held_pages",
    "leases",
)
"""Counters of hand-offs that have the same name in reports."""


def facts_of(engine: Engine) -> Facts:
    model, config, kv = engine.model, engine.config, engine.scheduler.kv
    template, speculation = model.chat_template, config.speculative_config
    defaults = {name: value for name, value in asdict(model.generation).items() if value is not None}
    target = kv.layout.target_groups
    return Facts(
        model_name=model.name,
        fingerprint=model.fingerprint,
        max_model_len=engine.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=model.spec.vocab_size,
        device=str(engine.runner.device),
        dtype=str(model.dtype).removeprefix("torch."),
        text=TextFacts(
            tokenizer=model.tokenizer.to_json(),
            tokenizer_source=model.tokenizer.source,
            bos_id=model.tokenizer.bos_id,
            eos_ids=model.tokenizer.eos_ids,
            templates={} if template is None else template.templates,
            template_source="" if template is None else template.source,
            template_variables={} if template is None else template.variables,
        ),
        sampling_defaults=defaults,
        drafter=None if speculation is None else speculation.method,
        drafts_max=engine.k,
        chooses_drafts=engine.pacer is not None,
        kv_tokens=min((kv.pool.arena(g).num_pages - 1) * kv.layout.groups[g].page_tokens for g in target),
        supports_grammars=engine.supports_grammars,
        sanitizer=config.sanitizer,
        transfer=TransferFacts(**asdict(engine.transfers.facts)) if engine.transfers and engine.exchanges_kv else None,
    )


def counters_of(engine: Engine, *, prompt_tokens: int, generated_tokens: int, aborted: int) -> Counters:
    scheduler, kv = engine.scheduler, engine.scheduler.kv
    pages = sum(arena.num_pages - 1 for arena in kv.pool.arenas)
    speculation, sanitizer, transfers = engine.speculation, engine.sanitizer, engine.transfer_counters()
    return Counters(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting + scheduler.num_loading,
        kv_usage=sum(arena.num_held for arena in kv.pool.arenas) / pages,
        aborted=aborted,
        preemptions=scheduler.num_preemptions,
        queried_tokens=kv.queried_tokens,
        hit_tokens=kv.hit_tokens,
        external_queried_tokens=transfers.queried_tokens,
        external_hit_tokens=transfers.transferred_tokens,
        prompt_tokens=prompt_tokens,
        generated_tokens=generated_tokens,
        drafts=speculation.drafts,
        draft_tokens=speculation.draft_tokens,
        accepted_tokens=speculation.accepted_tokens,
        accepted_at=speculation.accepted_at,
        dropped_drafts=kv.dropped_drafts,
        violations=0 if sanitizer is None else len(sanitizer.violations),
        **{name: getattr(transfers, name) for name in TRANSFER_COUNTERS},
        tiers={name: TierFigures(**asdict(counters)) for name, counters in engine.tier_counters().items()},
        **_choice_counters(engine),
    )


def _choice_counters(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if engine.pacer is not None:
        found |= {"choice": engine.pacer.describe(), **asdict(engine.pacer.counts)}
    lookup = _lookup_figures(engine)
    if lookup is not None:
        found |= {
            "lookups": lookup.lookups,
            "own_lookup_hits": lookup.own_hits,
            "shared_lookup_hits": lookup.shared_hits,
            "lookup_tokens": lookup.shared_tokens,
            "lookup_memory_bytes": lookup.memory_bytes,
        }
    return found


def _lookup_figures(engine: Engine) -> LookupFigures | None:
    lookup = engine.runner.drafting.lookup
    if lookup is None:
        return None
    return LookupFigures(
        lookups=lookup.lookups,
        own_hits=lookup.own_hits,
        shared_hits=lookup.shared_hits,
        shared_tokens=lookup.shared_tokens,
        memory_bytes=lookup.memory_bytes,
    )


def speculation_of(engine: Engine, call: int) -> Speculation:
    speculation, pacer = engine.config.speculative_config, engine.pacer
    return Speculation(
        call=call,
        drafter=None if speculation is None else speculation.method,
        drafts_max=engine.k,
        choice=None if pacer is None else pacer.describe(),
        costs=None if pacer is None else pacer.costs.seconds(),
        counts=None if pacer is None else pacer.counts,
        lookup=_lookup_figures(engine),
    )


def transfers_of(engine: Engine, call: int) -> Transfers:
    return Transfers(
        call=call,
        transport="" if engine.transfers is None else engine.transfers.link.transport,
        counters=asdict(engine.transfer_counters()),
    )


class RecentHits:
    """What the prefix cache gave to the latest requests of each tenant. One tenant's requests never displace
    another's."""

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._hits: dict[str, deque[RecentHit]] = {}

    def note(self, tenant: str, prompt_tokens: int, cached_tokens: int) -> None:
        hits = self._hits.setdefault(tenant, deque(maxlen=self._most))
        number = hits[0].number + 1 if hits else 1
        hits.appendleft(
            RecentHit(number=number, at_s=time.monotonic(), prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        )

    def listed(self) -> dict[str, list[RecentHit]]:
        return {tenant: list(hits) for tenant, hits in self._hits.items()}


def pages_of(engine: Engine, call: int, hits: RecentHits) -> Pages:
    census = take_census(engine.scheduler.kv)
    return Pages(
        call=call,
        step=census.step,
        arenas=[ArenaPages(**arena._asdict()) for arena in census.arenas],
        groups=[GroupPageCounts(**group._asdict()) for group in census.groups],
        recent_hits=hits.listed(),
    )
