"""What differs between methods: the network, which taps it reads, and the vocabulary it drafts from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.training.batches import Batch
from outrider.training.corpus import Streams
from outrider.training.networks import DFlashNetwork, DraftNetwork, Eagle3Network, NetworkShape
from outrider.training.settings import TrainSettings, dflash_taps, eagle3_taps
from outrider.training.target import Target


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftPlan:
    network: DraftNetwork
    taps: tuple[int, ...]
    head: Tensor
    """[draft vocabulary, hidden]: rows of the target's head."""
    mask_token_id: int | None
    """None where the network has no mask rows."""
    kept: Tensor | None
    """The target's ids of the draft vocabulary, rising; None where it is the whole vocabulary."""
    draft_ids: Tensor | None
    """The other way round, by target id; -1 for tokens that cannot be drafted."""

    def draft_labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(labels as draft ids, known): a label outside the draft vocabulary teaches nothing."""
        if self.draft_ids is None:
            return batch.labels, batch.known
        labels = self.draft_ids[batch.labels]
        return labels.clamp(min=0), batch.known & (labels >= 0)


def make_plan(settings: TrainSettings, target: Target, streams: Streams) -> DraftPlan:
    spec = target.spec
    length = streams.tokens.shape[1]
    chosen = settings.taps
    if chosen is None:
        chosen = dflash_taps(len(spec.layers)) if settings.method == "dflash" else eagle3_taps(len(spec.layers))
    if not chosen or any(not 0 <= tap < len(spec.layers) for tap in chosen):
        raise ConfigError(f"taps {chosen} do not all exist: the target has layers 0 to {len(spec.layers) - 1}")
    shape = NetworkShape.like(spec, layers=settings.layers, taps=len(chosen))
    if settings.method == "dflash":
        dflash = DFlashNetwork(spec, shape, length=length, block_size=settings.block_size)
        dflash.start_norm_from(target.parameters.final_norm)
        return DraftPlan(
            network=dflash,
            taps=chosen,
            head=target.head,
            mask_token_id=_mask_token(settings, streams, spec.vocab_size),
            kept=None,
            draft_ids=None,
        )
    kept = _draft_vocabulary(settings, streams, spec.vocab_size)
    network = Eagle3Network(spec, shape, length=length, steps=settings.k)
    network.start_norm_from(target.parameters.final_norm)
    if kept is None:
        return DraftPlan(
            network=network, taps=chosen, head=target.head, mask_token_id=None, kept=None, draft_ids=None
        )
    kept = kept.to(target.device)
    draft_ids = torch.full((spec.vocab_size,), -1, dtype=torch.int64, device=target.device)
    draft_ids[kept] = torch.arange(len(kept), device=target.device)
    return DraftPlan(
        network=network,
        taps=chosen,
        head=target.head[kept],
        mask_token_id=None,
        kept=kept,
        draft_ids=draft_ids,
    )


def _mask_token(settings: TrainSettings, streams: Streams, vocab_size: int) -> int:
    given = settings.mask_token_id
    if given is not None:
        if not 0 <= given < vocab_size:
            raise ConfigError(f"mask_token_id {given} is no token of the target, which knows {vocab_size}")
        return given
    used = np.bincount(streams.tokens.ravel(), minlength=vocab_size)
    # The lowest of the rarest: in most vocabularies a special token that conversations never use.
    return int(np.argmin(used))


def _draft_vocabulary(settings: TrainSettings, streams: Streams, vocab_size: int) -> Tensor | None:
    size = settings.draft_vocab_size
    if size is None or size >= vocab_size:
        return None
    counts = np.bincount(streams.tokens[streams.roles], minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(order))
