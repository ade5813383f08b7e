"""The declaration of every drafter. Torch-free; the one place where drafters have names.

A new drafter is one function here, one line in FOOTPRINTS, and its own file under drafters/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields
from outrider.kv.footprint import NO_DRAFTER, GroupSpec, KVFootprint, Proposing


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterShape:
    """What a checkpoint decides: everything else follows from the method."""

    groups: tuple[GroupSpec, ...] = ()
    taps: tuple[int, ...] = ()
    max_len: int | None = None
    fingerprint: str = ""
    block_rows: int = 0
    """Rows of a block as it was trained, for methods that draft in blocks."""


def ngram(shape: DrafterShape) -> KVFootprint:
    return KVFootprint(name="ngram", proposing=Proposing.LOOKUP, max_len=shape.max_len, fingerprint=shape.fingerprint)


def draft_model(shape: DrafterShape) -> KVFootprint:
    return KVFootprint(
        name="draft_model",
        proposing=Proposing.CHAIN,
        groups=shape.groups,
        durable_lead=1,
        keeps_accepted=True,
        feed_reads_kv=True,
        rebuild=True,
        max_len=shape.max_len,
        fingerprint=shape.fingerprint,
    )


def _one_layer_ahead(name: str, shape: DrafterShape) -> KVFootprint:
    """A layer that pairs the target's features at p with the token at p + 1."""
    return KVFootprint(
        name=name,
        proposing=Proposing.CHAIN,
        groups=shape.groups,
        token_reach=1,
        taps=shape.taps,
        max_len=shape.max_len,
        fingerprint=shape.fingerprint,
    )


def eagle(shape: DrafterShape) -> KVFootprint:
    return _one_layer_ahead("eagle", shape)


def mtp(shape: DrafterShape) -> KVFootprint:
    return _one_layer_ahead("mtp", shape)


def dflash(shape: DrafterShape) -> KVFootprint:
    return KVFootprint(
        name="dflash",
        proposing=Proposing.BLOCK,
        groups=shape.groups,
        scratch_extra=1,
        block_rows=shape.block_rows,
        taps=shape.taps,
        max_len=shape.max_len,
        fingerprint=shape.fingerprint,
    )


@dataclass(frozen=True, slots=True)
class Method:
    """A way to draft: how to declare it, and what its checkpoint must provide."""

    declare: Callable[[DrafterShape], KVFootprint]
    owns_kv: bool
    reads_taps: bool


FOOTPRINTS: dict[str, Method] = {
    "none": Method(lambda shape: NO_DRAFTER, owns_kv=False, reads_taps=False),
    "ngram": Method(ngram, owns_kv=False, reads_taps=False),
    "draft_model": Method(draft_model, owns_kv=True, reads_taps=False),
    "eagle": Method(eagle, owns_kv=True, reads_taps=True),
    "mtp": Method(mtp, owns_kv=True, reads_taps=True),
    "dflash": Method(dflash, owns_kv=True, reads_taps=True),
}


def footprint_for(method: str, shape: DrafterShape) -> KVFootprint:
    """The footprint of a drafting method with the given shape."""
    if method not in FOOTPRINTS:
        raise ConfigError(f"unknown drafting method {method!r}; known methods: {', '.join(FOOTPRINTS)}")
    return FOOTPRINTS[method].declare(shape)
