"""SplitMix64 on Python integers, and the constants that its tensor and its compiled versions share. Torch-free."""

from __future__ import annotations

WORD = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(word: int) -> int:
    """The int64 with these 64 bits."""
    word &= WORD
    return word - (1 << 64) if word >> 63 else word


def mix_word(word: int) -> int:
    """SplitMix64's finaliser: every input bit changes every output bit with probability 1/2."""
    word &= WORD
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)


def fork_seed(seed: int, fork: int) -> int:
    """The seed of one of several continuations; number 0 keeps the request's own."""
    assert fork >= 0
    return signed(seed if fork == 0 else mix_word(mix_word(seed) ^ mix_word(GAMMA * fork)))


def row_key(seed: int, position: int) -> int:
    """What the noise of one row is keyed by, as int64."""
    return signed(mix_word(mix_word(seed) + GAMMA * (position + 1)))
