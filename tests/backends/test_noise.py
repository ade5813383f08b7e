"""Noise is a pure function of seed, position and token, looks random in each, and is the same on every device."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from tests.runner.chi_square import chi_square_p, uniform_p
from torch import Tensor

from outrider.backends.keyed_noise import GAMMA, SQRT_HALF, WEIGHT_BITS, WORD, fork_seed, mix_word, row_key, signed
from outrider.backends.reference.noise import gumbel, log, weight

P_MIN = 1e-3
GOLDEN = [
    [0.8509171899612171, 1.0357928357318127, 0.3789240971308233],
    [1.078470309614791, 1.6130971960442595, -0.11537935263114225],
]
"""Noise of tokens 0, 1 and 49151 under (seed, position) = (0, 0) and (42, 17)."""


def keys_of(pairs: list[tuple[int, int]]) -> Tensor:
    return torch.tensor([row_key(seed, position) for seed, position in pairs])


def uniform(noise: Tensor) -> Tensor:
    return torch.exp(-torch.exp(-noise))


SEEDS = [(seed, 7) for seed in range(20_000)]
POSITIONS = [(7, position) for position in range(20_000)]
FORKS = [(fork_seed(7, fork), 7) for fork in range(20_000)]
SIDES = {
    "seeds": gumbel(keys_of(SEEDS), torch.tensor(3)),
    "high seeds": gumbel(keys_of([(seed << 40, 7) for seed, _ in SEEDS]), torch.tensor(3)),
    "positions": gumbel(keys_of(POSITIONS), torch.tensor(3)),
    "tokens": gumbel(keys_of([(7, 7)]), torch.arange(20_000)),
    "forks": gumbel(keys_of(FORKS), torch.tensor(3)),
    "seeds and positions": gumbel(keys_of([(i, i) for i in range(20_000)]), torch.tensor(3)),
    "positions against tokens": gumbel(keys_of(POSITIONS), 20_000 - torch.arange(20_000)),
}


@pytest.mark.parametrize("side", SIDES)
def test_noise_is_uniform_along(side: str) -> None:
    u = uniform(SIDES[side])
    assert uniform_p((u * 100).long(), 100) > P_MIN
    # The finest digits too: a bad hash shows there first.
    assert uniform_p((u * 2**40).long() % 64, 64) > P_MIN


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbours_are_independent_along(side: str, lag: int) -> None:
    cells = (uniform(SIDES[side]) * 12).long()
    assert uniform_p(cells[:-lag] * 12 + cells[lag:], 144) > P_MIN


def test_the_tails_have_the_right_weight() -> None:
    noise = gumbel(keys_of([(1, position) for position in range(20)])[:, None], torch.arange(50_000))
    levels = [-2.2, -1.0, 0.0, 2.0, 5.0, 8.0, 11.0]
    below = [0.0, *(math.exp(-math.exp(-level)) for level in levels), 1.0]
    counts = torch.bincount(torch.bucketize(noise.flatten(), torch.tensor(levels, dtype=torch.float64)))
    expected = [(high - low) * noise.numel() for low, high in itertools.pairwise(below)]
    assert chi_square_p(counts.tolist(), expected) > P_MIN


def test_noise_is_what_the_formula_says() -> None:
    rng = random.Random(0)
    for _ in range(300):
        seed, position, token = rng.randrange(-(1 << 63), 1 << 63), rng.randrange(1 << 20), rng.randrange(1 << 18)
        bits = mix_word(row_key(seed, position) + GAMMA * (token + 1)) >> 12
        exact = -math.log(-math.log((bits + 0.5) / 2**52))
        assert float(gumbel(keys_of([(seed, position)]), torch.tensor(token))) == pytest.approx(exact, abs=1e-9)


def test_noise_never_changes_from_version_to_version() -> None:
    """A stored seed must give the same text again."""
    assert row_key(0, 0) == signed(0xE220A8397B1DCDAF)  # the first number of SplitMix64 from 0
    found = gumbel(keys_of([(0, 0), (42, 17)])[:, None], torch.tensor([0, 1, 49_151]))
    assert found.tolist() == GOLDEN


def test_any_subset_in_any_shape_gives_the_same_noise() -> None:
    keys = keys_of([(seed, 5) for seed in range(9)])
    full = gumbel(keys[:, None], torch.arange(1000))
    picked = torch.tensor([999, 3, 500, 3])
    assert torch.equal(gumbel(keys[:, None], picked), full[:, picked])
    for i in range(9):
        assert torch.equal(gumbel(keys[i], torch.arange(i, 1000)), full[i, i:])


def test_the_largest_and_smallest_noise_are_finite() -> None:
    least, most = 0.5 * 2.0**-52, 1.0 - 0.5 * 2.0**-52
    u = torch.tensor([least, most], dtype=torch.float64)
    assert (-log(-log(u))).tolist() == pytest.approx([-3.603, 36.737], abs=1e-3)


def test_log_and_weight_are_accurate() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(50_000, dtype=torch.float64, generator=generator)
    x = torch.cat([x, 1 - x * 1e-12, x * 1e-15 + 1e-300, x * 40, torch.tensor([SQRT_HALF, 0.5, 2.0])])
    exact = x.log()
    assert float(((log(x) - exact).abs() / exact.abs().clamp(min=1e-300)).max()) < 1e-11
    y = torch.cat([-x[:50_000] * 40, torch.tensor([0.0, -1e-17, -1e4, -math.inf], dtype=torch.float64)])
    assert float((weight(y).double() / 2.0**WEIGHT_BITS - y.exp()).abs().max()) < 2e-12
    assert weight(torch.tensor([0.0, -100.0, -math.inf], dtype=torch.float64)).tolist() == [1 << WEIGHT_BITS, 0, 0]


def test_forks_have_streams_of_their_own() -> None:
    assert fork_seed(5, 0) == 5
    seeds = {fork_seed(seed, fork) for seed in range(100) for fork in range(100)}
    assert len(seeds) == 10_000
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)


def test_one_bit_of_the_key_changes_half_of_the_result() -> None:
    rng = random.Random(2)
    for bit in range(64):
        changed = 0
        for _ in range(64):
            word = rng.getrandbits(64)
            changed += (mix_word(word) ^ mix_word(word ^ (1 << bit))).bit_count()
        assert abs(changed / 64 - 32) < 3
    assert mix_word(WORD + 5) == mix_word(4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_is_the_same_on_the_gpu() -> None:
    keys = keys_of([(seed, 11) for seed in range(16)])[:, None]
    here = gumbel(keys, torch.arange(50_000))
    assert torch.equal(gumbel(keys.cuda(), torch.arange(50_000).cuda()).cpu(), here)
    y = -torch.rand(100_000, dtype=torch.float64) * 40
    assert torch.equal(weight(y.cuda()).cpu(), weight(y))
