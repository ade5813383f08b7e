"""The ways in which drafters treat KV, as footprints that differ in their names and shapes only. Torch-free.

A drafter's own file calls one of these functions, or builds a `KVFootprint` of another kind. The simulation and the
tests draw from ARCHETYPES, so they cover every way of treating KV without knowing any drafter.

    lookup               drafts come from an index over tokens
    heads                drafts come from the target's last hidden state
    chain_from_tokens    a decoder that is fed token ids and runs ahead, one token a pass
    chain_from_taps      a layer that pairs hidden states at p with the token at p + 1, and runs ahead
    block_from_taps      one pass over a block of masks, with a context made from hidden states
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.kv.footprint import NO_DRAFTER, GroupSpec, KVFootprint, Proposing


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterShape:
    """What a drafter's checkpoint and the engine's limits decide; the rest of a footprint is its archetype's."""

    groups: tuple[GroupSpec, ...] = ()
    taps: tuple[int, ...] = ()
    max_len: int | None = None
    fingerprint: str = ""
    block_rows: int = 0
    """Rows of a block as it was trained, for drafters that propose in blocks."""
    smaller_blocks: tuple[int, ...] = ()
    """Smaller sizes of blocks in which it was trained as well."""


def nothing(name: str, shape: DrafterShape) -> KVFootprint:
    return NO_DRAFTER


def _declared(name: str, shape: DrafterShape, proposing: Proposing, **traits: Any) -> KVFootprint:
    return KVFootprint(name=name, proposing=proposing, max_len=shape.max_len, fingerprint=shape.fingerprint, **traits)


def lookup(name: str, shape: DrafterShape) -> KVFootprint:
    return _declared(name, shape, Proposing.LOOKUP)


def heads(name: str, shape: DrafterShape) -> KVFootprint:
    return _declared(name, shape, Proposing.HEADS, taps=shape.taps)


def chain_from_tokens(name: str, shape: DrafterShape) -> KVFootprint:
    traits = {"durable_lead": 1, "keeps_accepted": True, "feed_reads_kv": True, "rebuild": True}
    return _declared(name, shape, Proposing.CHAIN, groups=shape.groups, **traits)


def chain_from_taps(name: str, shape: DrafterShape) -> KVFootprint:
    return _declared(name, shape, Proposing.CHAIN, groups=shape.groups, taps=shape.taps, token_reach=1)


def block_from_taps(name: str, shape: DrafterShape) -> KVFootprint:
    traits = {"scratch_extra": 1, "block_rows": shape.block_rows, "smaller_blocks": shape.smaller_blocks}
    return _declared(name, shape, Proposing.BLOCK, groups=shape.groups, taps=shape.taps, **traits)


@dataclass(frozen=True, slots=True)
class Archetype:
    """A way of treating KV: the function that declares it, and what its shape must provide."""

    declare: Callable[[str, DrafterShape], KVFootprint]
    owns_kv: bool
    reads_taps: bool


ARCHETYPES: Mapping[str, Archetype] = {
    "nothing": Archetype(nothing, owns_kv=False, reads_taps=False),
    "lookup": Archetype(lookup, owns_kv=False, reads_taps=False),
    "heads": Archetype(heads, owns_kv=False, reads_taps=True),
    "chain_from_tokens": Archetype(chain_from_tokens, owns_kv=True, reads_taps=False),
    "chain_from_taps": Archetype(chain_from_taps, owns_kv=True, reads_taps=True),
    "block_from_taps": Archetype(block_from_taps, owns_kv=True, reads_taps=True),
}
