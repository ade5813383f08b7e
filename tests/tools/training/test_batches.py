"""Anchors, labels, and the walk that simulates decoding, against loops."""

from __future__ import annotations

import numpy as np
import torch

from outrider.tools.training.acceptance import answers, walk
from outrider.tools.training.batches import Pool, block_labels, draw_anchors, eligible_anchors, known_counts


def random_pool(streams: int = 5, length: int = 20) -> Pool:
    generator = torch.Generator().manual_seed(4)
    best = torch.randint(50, (streams, length), generator=generator)
    follows = torch.rand(streams, length, generator=generator) < 0.7
    tokens = torch.where(follows, best, (best + 1) % 50)
    roles = torch.rand(streams, length, generator=generator) < 0.8
    return Pool(tokens=tokens, best=best, roles=roles, taps=torch.zeros(streams, length, 1), final=None)


def test_a_label_is_known_while_the_text_follows_the_target() -> None:
    pool, k = random_pool(), 4
    streams, length = pool.tokens.shape
    anchors = torch.arange(length).expand(streams, -1)
    _, labels, known = block_labels(pool, anchors, torch.ones_like(anchors, dtype=torch.bool), k)
    for stream in range(streams):
        for anchor in range(length):
            alive = True
            for j in range(1, k + 1):
                place = anchor + j
                alive = alive and place < length and bool(pool.roles[stream, place])
                assert bool(known[stream, anchor, j - 1]) == alive
                if alive:
                    assert labels[stream, anchor, j - 1] == pool.best[stream, place]
                    alive = bool(pool.tokens[stream, place] == pool.best[stream, place])


def test_anchors_are_different_rising_and_eligible() -> None:
    pool = random_pool()
    counts = known_counts(pool, 4)
    eligible = eligible_anchors(pool.roles)
    assert torch.equal(counts > 0, eligible)
    assert not eligible[:, 0].any()
    anchors, real = draw_anchors(counts, 16, torch.Generator().manual_seed(0))
    for stream in range(len(pool)):
        drawn = anchors[stream][real[stream]].tolist()
        assert drawn == sorted(set(drawn))
        assert len(drawn) == min(16, int(eligible[stream].sum()))
        assert all(eligible[stream, anchor] for anchor in drawn)


def test_the_walk_takes_what_decoding_would_take() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        k, length = int(rng.integers(1, 5)), 30
        right = rng.random((length, k)) < 0.7
        start, stop = 3, int(rng.integers(5, length))
        steps = tokens = 0
        anchor = start
        while True:
            accepted = 0
            while accepted < k and anchor + accepted + 1 < stop and right[anchor, accepted]:
                accepted += 1
            if anchor >= stop - 1 or (accepted < k and anchor + accepted + 1 >= stop):
                break
            steps, tokens, anchor = steps + 1, tokens + accepted + 1, anchor + accepted + 1
        found = walk(right, start, stop)
        assert (found.steps, found.tokens) == (steps, tokens)
        assert sum(found.accepted_at) == tokens - steps


def test_answers_are_the_stretches_that_the_assistant_wrote() -> None:
    roles = np.array([1, 1, 0, 0, 1, 0, 1, 1, 1], dtype=np.bool_)
    assert list(answers(roles)) == [(0, 2), (4, 5), (6, 9)]
    assert list(answers(np.zeros(3, dtype=np.bool_))) == []
