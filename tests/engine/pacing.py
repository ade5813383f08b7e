"""Engines that choose how much to draft, and choose something else at every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from outrider.engine.engine import Engine
from outrider.scheduler.pacing.pacer import Pace, PacedRequest
from outrider.scheduler.pacing.worth import Proposed
from outrider.speculative.lookup import Match


def choose_at_random(engine: Engine, texts: Sequence[Sequence[int]] = (), *, seed: int = 0) -> Counter[str]:
    """Draws every choice of the engine's pacer: how many drafts are verified and proposed for each request, whether any
    are looked up, and when a chain goes on. What is looked up goes on as one of these texts does, up to a place that is
    drawn too. Returns what was drawn and what came of it, counted."""
    pacer, rng, seen = engine.pacer, random.Random(seed), Counter[str]()
    assert pacer is not None
    choose, note = pacer.begin, pacer.proposed

    def begin(decoding: Collection[PacedRequest], *, prompt_rows: int) -> Pace:
        offered = [(request, request.drafts) for request in decoding if request.pace is not None]
        pace = choose(decoding, prompt_rows=prompt_rows)
        for request, drafts in offered:
            request.drafts = rng.choice((0, drafts, rng.randint(0, drafts)))
            most = request.k if pacer.sizes else 0
            request.wanted = rng.choice((0, most, rng.randint(0, most)))
            seen["left out"] += request.drafts < drafts
            seen["cut off"] += 0 < request.drafts < drafts
            seen["plain"] += not request.drafts
            seen["not proposed for"] += not request.wanted
        pacer._newcomers_k = rng.randint(0, engine.k) if pacer.sizes else 0
        return replace(
            pace,
            lookup=rng.choice((0, 2, 15)),
            going_on=rng.choice((0.0, 0.1, 0.9)),
            row_price=rng.choice((0.0, 0.2, 0.9)),
            draft_price=rng.choice((0.0, 1.0, 5.0)),
            outlook_at=rng.choice((-1, 0)) if pacer.sizes else -1,
        )

    def proposed(request: object, found: Proposed | None) -> None:
        if found is not None:
            seen[f"from {found.source.name}"] += 1
        note(request, found)  # type: ignore[arg-type]

    lookup = engine.runner.drafting.lookup
    assert lookup is not None
    search = lookup.find

    def find(key: str, salt: str, tokens: Sequence[int], k: int) -> list[Match]:
        found, known = search(key, salt, tokens, k), list(tokens)
        text = next((text for text in texts if list(text[: len(known)]) == known), None)
        if found or text is None or rng.random() < 0.5:
            return found
        right = list(text[len(known) : len(known) + k])
        drafts = right[: rng.randint(0, len(right))]
        drafts += [rng.randrange(256) for _ in range(rng.randint(not drafts, k - len(drafts)))]
        return [Match(drafts, rng.randint(3, 32), False)]

    pacer.begin, pacer.proposed = begin, proposed  # type: ignore[method-assign, assignment]
    lookup.find = find  # type: ignore[method-assign]
    return seen
