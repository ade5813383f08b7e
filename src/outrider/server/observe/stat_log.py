"""A log line with statistics every few seconds, in vLLM's format."""

from __future__ import annotations

import asyncio
import logging
import time

from outrider.server.messages import Counters
from outrider.server.observe.figures import Figures

logger = logging.getLogger("outrider.server")


async def log_figures(figures: Figures, interval_s: float, *, with_transfers: bool = False) -> None:
    """Logs until it is cancelled; silent while there is no work. `with_transfers`: this is a worker that exchanges KV
    with others."""
    before, at = figures.totals, time.monotonic()
    was_busy = False
    while True:
        await asyncio.sleep(interval_s)
        now, last_at, at = figures.totals, at, time.monotonic()
        busy = now.generated_tokens > before.generated_tokens or now.running + now.waiting > 0
        if busy or was_busy:
            logger.info("%s", line(before, now, at - last_at))
            if with_transfers:
                logger.info("%s", transfer_line(before, now, at - last_at))
        before, was_busy = now, busy


def line(before: Counters, now: Counters, seconds: float) -> str:
    def per_s(name: str) -> float:
        return float((getattr(now, name) - getattr(before, name)) / seconds)

    parts = [
        f"Avg prompt throughput: {per_s('prompt_tokens'):.1f} tokens/s",
        f"Avg generation throughput: {per_s('generated_tokens'):.1f} tokens/s",
        f"Running: {now.running} reqs",
        f"Waiting: {now.waiting} reqs",
        f"KV cache usage: {now.kv_usage:.1%}",
        f"Prefix cache hit rate: {now.hit_tokens / now.queried_tokens if now.queried_tokens else 0.0:.1%}",
    ]
    drafts, drafted = now.drafts - before.drafts, now.draft_tokens - before.draft_tokens
    accepted = now.accepted_tokens - before.accepted_tokens
    if drafts:
        parts.append(f"Mean acceptance length: {1 + accepted / drafts:.2f}")
        parts.append(f"Draft acceptance rate: {accepted / drafted:.1%}")
    if now.choice is not None:
        choice = now.choice
        parts.append(f"Drafting for: {choice.drafting_requests} reqs, up to {choice.drafts} tokens")
        parts.append(f"Expected: {choice.rate:.1f} tokens/s, {choice.plain_rate:.1f} without drafts")
    return ", ".join(parts)


def transfer_line(before: Counters, now: Counters, seconds: float) -> str:
    def new(name: str) -> int:
        return int(getattr(now, name) - getattr(before, name))

    parts = [
        f"KV transfer: {new('handed_over')} prompts handed over",
        f"{new('hand_overs_refused')} without KV",
        f"{new('leases_expired')} leases expired",
        f"Held: {now.leases} prompts, {now.held_pages} pages",
        f"Fetches: {new('fetches')}, {new('fetch_failures')} failed",
        f"Prompts computed here: {new('recomputed_prompts')}",
        f"Received: {new('transferred_bytes') / seconds / 1e6:.1f} MB/s",
    ]
    return ", ".join(parts)
