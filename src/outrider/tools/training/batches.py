"""The input of a training step: streams with the target's states, random anchors, and labels for the drafts.

    position   …  a-1 │  a      a+1   …  a+k
               context │ anchor  draft 1 … draft k

The target has read what lies before the anchor; the anchor is the token it sampled last. Draft j is right if it is
what the target itself prefers at a + j given everything before. In text sampled at a temperature above 0 that is known
only while the text follows the target's preference: later drafts of the block have no label.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pool:
    """Streams whose target states have been computed, ready to be drawn from several times."""

    tokens: Tensor
    """Token ids: [streams, length], int64."""
    best: Tensor
    """The target's most likely token at each position, given everything before it."""
    roles: Tensor
    taps: Tensor
    """[streams, length, taps * hidden], scaled."""
    final: Tensor | None
    """[streams, length, hidden]: the head's input at p, which decides the token at p + 1."""
    probability: Tensor | None = None
    """[streams, length], float32: the target's probability of each token; None if it is not needed."""

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, index: Tensor) -> Pool:
        final = None if self.final is None else self.final[index]
        probability = None if self.probability is None else self.probability[index]
        return Pool(
            tokens=self.tokens[index],
            best=self.best[index],
            roles=self.roles[index],
            taps=self.taps[index],
            final=final,
            probability=probability,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    tokens: Tensor
    """[streams, length]"""
    taps: Tensor
    anchors: Tensor
    """[streams, anchors], rising."""
    labels: Tensor
    """[streams, anchors, k]"""
    known: Tensor
    """[streams, anchors, k]: whether the label is known to be the target's choice."""
    teacher: Tensor | None
    """[streams, anchors, k, hidden]: the head's input that decides each label."""

    @property
    def k(self) -> int:
        return self.labels.shape[-1]

    def end_to_end(self, times: int) -> Batch:
        """Joins each run of `times` streams into one: each is context of the next, and positions continue."""
        streams, length = self.tokens.shape
        joined = streams // times
        starts = torch.arange(streams, device=self.anchors.device) % times * length
        teacher = self.teacher
        return Batch(
            tokens=self.tokens.reshape(joined, -1),
            taps=self.taps.reshape(joined, times * length, -1),
            anchors=(self.anchors + starts[:, None]).view(joined, -1),
            labels=self.labels.view(joined, -1, self.k),
            known=self.known.view(joined, -1, self.k),
            teacher=None if teacher is None else teacher.view(joined, -1, *teacher.shape[2:]),
        )


def eligible_anchors(roles: Tensor) -> Tensor:
    """Marks positions where the assistant sampled this token and the next; never position 0, which has no context."""
    following = torch.zeros_like(roles)
    following[:, :-1] = roles[:, 1:]
    eligible = roles & following
    eligible[:, 0] = False
    return eligible


def known_counts(pool: Pool, k: int) -> Tensor:
    """Returns [streams, length]: how many of the k drafts after an anchor at each position would have a label."""
    eligible = eligible_anchors(pool.roles)
    everywhere = torch.arange(pool.tokens.shape[1], device=pool.tokens.device).expand_as(pool.tokens)
    _, _, known = block_labels(pool, everywhere, eligible, k)
    return known.sum(-1)


def anchor_weights(pool: Pool, k: int, sure_weight: float) -> Tensor:
    """Returns [streams, length]: the weight with which each position is drawn as an anchor.

    Proportional to the number of labels, because an anchor with few teaches little for the same work, and lower where
    the target was sure of the token. The first token of an answer has its full weight, since decoding starts there.
    """
    counts = known_counts(pool, k).float()
    if pool.probability is None:
        return counts
    first = torch.zeros_like(pool.roles)
    first[:, 1:] = pool.roles[:, 1:] & ~pool.roles[:, :-1]
    return counts * torch.where(first, 1.0, sure_weight + (1 - sure_weight) * (1 - pool.probability))


def draw_anchors(weights: Tensor, anchors: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns distinct anchors of each stream, in rising order, and which of them are real.

    Positions are drawn in proportion to their weights, none with a weight of 0. A stream with too few of them has the
    missing anchors at its end, where they have no labels.
    """
    waits = torch.empty(weights.shape, device=weights.device).exponential_(generator=generator) / weights
    chosen = waits.topk(anchors, dim=1, largest=False)
    real = chosen.values.isfinite()
    places, order = torch.where(real, chosen.indices, weights.shape[1] - 1).sort(dim=1)
    return places, real.gather(1, order)


def block_labels(pool: Pool, anchors: Tensor, real: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns positions, labels and `known` of the drafts after each anchor, each [streams, anchors, k]."""
    length = pool.tokens.shape[1]
    raw = anchors[..., None] + torch.arange(1, k + 1, device=anchors.device)
    positions = raw.clamp(max=length - 1)
    flat = positions.flatten(1)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, flat).view(positions.shape)

    labels = at(pool.best)
    sampled = at(pool.roles) & (raw < length) & real[..., None]
    followed = at(pool.tokens) == labels
    # Draft j needs the text to have followed the target up to j - 1.
    so_far = torch.ones_like(followed)
    so_far[..., 1:] = followed[..., :-1]
    known = torch.cumprod((sampled & so_far).to(torch.int32), dim=-1).bool()
    return positions, labels, known


def make_batch(pool: Pool, anchors: Tensor, real: Tensor, k: int) -> Batch:
    positions, labels, known = block_labels(pool, anchors, real, k)
    teacher = None
    if pool.final is not None:
        rows = (positions - 1).flatten(1)
        teacher = pool.final.gather(1, rows[..., None].expand(-1, -1, pool.final.shape[-1]))
        teacher = teacher.view(*positions.shape, -1)
    return Batch(tokens=pool.tokens, taps=pool.taps, anchors=anchors, labels=labels, known=known, teacher=teacher)


def decay_weights(k: int, gamma: float, device: torch.device) -> Tensor:
    """Returns exp(-(j - 1) / gamma) for drafts j = 1 … k: an early miss costs all drafts after it."""
    return torch.exp(-torch.arange(k, dtype=torch.float32, device=device) / gamma)


def dpace_weights(confidence: Tensor, alpha: float = 0.5) -> Tensor:
    """Returns Σ over m ≥ j of Π over i ≤ m of ((1 - alpha) q_i + alpha), q being the confidence in each label."""
    running = torch.cumprod((1 - alpha) * confidence.detach() + alpha, dim=-1)
    return running.flip(-1).cumsum(-1).flip(-1)
