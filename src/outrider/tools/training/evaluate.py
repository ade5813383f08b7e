"""Acceptance of a drafter on greedy answers: drafts at every position, from which the steps of decoding follow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.tools.training.acceptance import Acceptance, answers, nothing, walk
from outrider.tools.training.batches import Batch, Pool, eligible_anchors
from outrider.tools.training.corpus import Streams, read_corpus
from outrider.tools.training.drafts import DraftPlan
from outrider.tools.training.pooling import ARGMAX_ROWS, wide_logits

CATEGORIES_FILE = "categories.json"
# Fraction of tokens that must be the target's choice for an answer to count as greedy; rare ties are allowed.
GREEDY_FRACTION = 0.97


def read_evaluation(path: Path, *, vocab_size: int) -> tuple[Streams, list[str]]:
    """Reads streams of greedy answers and the category of each."""
    streams = read_corpus(path, vocab_size=vocab_size)
    names = path / CATEGORIES_FILE
    try:
        categories = json.loads(names.read_text(encoding="utf-8")) if names.is_file() else ["all"] * len(streams)
    except (OSError, ValueError, RecursionError) as problem:
        raise ConfigError(f"{names} is not readable JSON: {problem}") from None
    if not isinstance(categories, list) or len(categories) != len(streams):
        raise ConfigError(f"{names} must list a category for each of {len(streams)} streams")
    return streams, [str(category) for category in categories]


class Evaluation:
    """Evaluates a drafter repeatedly; the target's states are kept, so that each round costs only the drafts."""

    def __init__(
        self,
        pool: Pool,
        categories: list[str],
        plan: DraftPlan,
        rows: Callable[[Batch], Tensor],
        *,
        batch_streams: int,
        anchors: int,
        k: int,
    ) -> None:
        self.pool, self.categories, self.plan, self.rows = pool, categories, plan, rows
        self.batch_streams, self.anchors, self.k = batch_streams, anchors, k
        self.eligible = eligible_anchors(pool.roles)

    def right(self) -> npt.NDArray[np.bool_]:
        """Returns [streams, length, k]: whether draft j + 1 after an anchor at each position is right."""
        found = torch.zeros(*self.pool.tokens.shape, self.k, dtype=torch.bool, device=self.pool.tokens.device)
        for start in range(0, len(self.pool), self.batch_streams):
            real = torch.arange(start, min(start + self.batch_streams, len(self.pool)), device=found.device)
            # Every pass has the shape of a training step, so that nothing is compiled for streams of that length.
            index = torch.cat([real, real[:1].expand(self.batch_streams - len(real))])
            part = self.pool.take(index)
            order = self.eligible[index].to(torch.int32).argsort(dim=1, descending=True, stable=True)
            most = int(self.eligible[index].sum(1).max())
            for first in range(0, most, self.anchors):
                chosen = order[:, first : first + self.anchors]
                missing = self.anchors - chosen.shape[1]
                if missing:
                    chosen = torch.cat([chosen, chosen[:, -1:].expand(-1, missing)], dim=1)
                anchors = chosen.sort(dim=1).values.clamp(min=1)
                hits = self._hits(part, anchors)[: len(real)]
                found[real[:, None], anchors[: len(real)]] = hits
        return found.cpu().numpy()

    def _hits(self, part: Pool, anchors: Tensor) -> Tensor:
        # Here the text itself gives the labels.
        positions = anchors[..., None] + torch.arange(1, self.k + 1, device=anchors.device)
        length = part.tokens.shape[1]
        tokens = part.tokens.gather(1, positions.clamp(max=length - 1).flatten(1)).view(positions.shape)
        batch = Batch(
            tokens=part.tokens,
            taps=part.taps,
            anchors=anchors,
            labels=tokens,
            known=positions < length,
            teacher=None,
        )
        # Gradients stay on, because the network was compiled with them for training.
        rows = self.rows(batch).detach()
        head = self.plan.head.to(rows.dtype)
        flat = rows.flatten(0, 2)
        best = torch.cat([wide_logits(some, head).argmax(-1) for some in flat.split(ARGMAX_ROWS)])
        labels, known = self.plan.draft_labels(batch)
        return (best.view(labels.shape) == labels) & known

    def run(self) -> dict[str, Acceptance]:
        """Returns the acceptance by category, and over all answers as "all"."""
        right = self.right()
        tokens, best = self.pool.tokens.cpu().numpy(), self.pool.best.cpu().numpy()
        roles = self.pool.roles.cpu().numpy()
        totals: dict[str, Acceptance] = {"all": nothing(self.k)}
        for number, category in enumerate(self.categories):
            for start, stop in answers(roles[number]):
                greedy = (tokens[number, start:stop] == best[number, start:stop]).mean()
                if start == 0 or greedy < GREEDY_FRACTION:
                    continue
                one = walk(right[number], start, stop)
                for name in {category, "all"}:
                    totals[name] = totals.get(name, nothing(self.k)).plus(one)
        return totals


def describe(totals: dict[str, Acceptance]) -> str:
    if not totals["all"].steps:
        return "acceptance cannot be measured: no held-out answer is the target's greedy one"
    names = sorted(totals, key=lambda name: (name != "all", name))
    return "held-out acceptance length " + ", ".join(f"{name} {totals[name].mean_length:.2f}" for name in names)


def as_json(totals: dict[str, Acceptance], k: int) -> dict[str, Any]:
    return {
        "k": k,
        "categories": {
            name: {
                "mean_acceptance_length": round(one.mean_length, 4),
                "steps": one.steps,
                "tokens": one.tokens,
                "accepted_at": list(one.accepted_at),
            }
            for name, one in sorted(totals.items())
        },
    }
