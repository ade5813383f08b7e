"""What differs between methods: the network, the taps it reads, and the vocabulary it drafts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.tools.training.batches import Batch
from outrider.tools.training.corpus import Streams
from outrider.tools.training.networks import DFlashNetwork, DraftNetwork, Eagle3Network, NetworkShape
from outrider.tools.training.settings import TrainSettings, dflash_taps, eagle3_taps
from outrider.tools.training.target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChoices:
    """Tokens that are chosen from the data, once per run, because the network is trained for them."""

    mask_token_id: int | None
    """Mask token; None if the network has no mask rows."""
    kept: tuple[int, ...] | None
    """The draft vocabulary as the target's ids, rising; None for the whole vocabulary."""

    def state(self) -> dict[str, Any]:
        kept = None if self.kept is None else torch.tensor(self.kept, dtype=torch.int64)
        return {"mask_token_id": self.mask_token_id, "kept": kept}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TokenChoices:
        kept = state["kept"]
        return cls(mask_token_id=state["mask_token_id"], kept=None if kept is None else tuple(kept.tolist()))


def choose_tokens(settings: TrainSettings, lengths: Sequence[Streams], vocab_size: int) -> TokenChoices:
    """Chooses tokens from streams of every length, given with the usual ones first."""
    if settings.in_blocks:
        return TokenChoices(mask_token_id=_mask_token(settings, lengths, vocab_size), kept=None)
    return TokenChoices(mask_token_id=None, kept=_draft_vocabulary(settings, lengths[0], vocab_size))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftPlan:
    network: DraftNetwork
    taps: tuple[int, ...]
    head: Tensor
    """[draft vocabulary, hidden]: rows of the target's head."""
    choices: TokenChoices
    draft_ids: Tensor | None
    """Draft id of each target id, -1 for tokens that cannot be drafted; None if all can."""

    def draft_labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the labels as draft ids, and which are known; a label outside the draft vocabulary is not."""
        if self.draft_ids is None:
            return batch.labels, batch.known
        labels = self.draft_ids[batch.labels]
        return labels.clamp(min=0), batch.known & (labels >= 0)


def make_plan(settings: TrainSettings, target: Target, length: int, choices: TokenChoices) -> DraftPlan:
    """Makes the network and its tokens; `length` is that of the longest streams."""
    taps = choose_taps(settings, len(target.spec.layers))
    network = _network(settings, target, length, len(taps), choices)
    network.start_norm_from(target.parameters.final_norm)
    if choices.kept is None:
        return DraftPlan(network=network, taps=taps, head=target.head, choices=choices, draft_ids=None)
    kept = torch.tensor(choices.kept, device=target.device)
    draft_ids = torch.full((target.spec.vocab_size,), -1, dtype=torch.int64, device=target.device)
    draft_ids[kept] = torch.arange(len(kept), device=target.device)
    return DraftPlan(network=network, taps=taps, head=target.head[kept], choices=choices, draft_ids=draft_ids)


def choose_taps(settings: TrainSettings, layers: int) -> tuple[int, ...]:
    taps = settings.taps
    if taps is None:
        taps = dflash_taps(layers) if settings.in_blocks else eagle3_taps(layers)
    if not taps or any(not 0 <= tap < layers for tap in taps):
        raise ConfigError(f"taps {list(taps)} do not all exist: the target has layers 0 to {layers - 1}")
    return taps


def _network(settings: TrainSettings, target: Target, length: int, taps: int, choices: TokenChoices) -> DraftNetwork:
    spec = target.spec
    shape = NetworkShape.like(spec, layers=settings.layers, taps=taps)
    if not settings.in_blocks:
        if spec.embedding_scale != 1.0:
            raise ConfigError(
                f"an EAGLE-3 drafter cannot be trained for {target.name}: its checkpoints have no place for "
                f"the target's embedding scale of {spec.embedding_scale:g}; train a DFlash drafter instead"
            )
        return Eagle3Network(spec, shape, length=length, steps=settings.k)
    mask_id = torch.tensor([choices.mask_token_id], device=target.device)
    return DFlashNetwork(spec, shape, length=length, block_size=settings.block_size, mask_row=target.embed(mask_id)[0])


def _mask_token(settings: TrainSettings, lengths: Sequence[Streams], vocab_size: int) -> int:
    given = settings.mask_token_id
    if given is not None:
        if not 0 <= given < vocab_size:
            raise ConfigError(f"mask_token_id {given} is not a token of the target, which has {vocab_size}")
        return given
    used = sum(np.bincount(streams.tokens.ravel(), minlength=vocab_size) for streams in lengths)
    # The lowest of the rarest ids: in most vocabularies a special token that conversations never use.
    return int(np.argmin(used))


def _draft_vocabulary(settings: TrainSettings, streams: Streams, vocab_size: int) -> tuple[int, ...] | None:
    size = settings.draft_vocab_size
    if size is None or size >= vocab_size:
        return None
    return tuple(sorted(_by_frequency(streams, vocab_size)[:size]))


def most_frequent(streams: Streams, vocab_size: int) -> tuple[int, ...]:
    """Returns two thirds of all tokens, those that the assistant wrote most often first; more would gain little.

    Tokens that never occur are ordered by id, which in most tokenizers follows their frequency.
    """
    return tuple(_by_frequency(streams, vocab_size)[: 2 * vocab_size // 3])


def _by_frequency(streams: Streams, vocab_size: int) -> list[int]:
    counts = np.bincount(streams.tokens[streams.roles], minlength=vocab_size)
    order: list[int] = np.argsort(-counts, kind="stable").tolist()
    return order
