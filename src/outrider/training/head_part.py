"""A part of the head that a step's loss is computed over: over a large vocabulary, most of a step is the head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.errors import ConfigError

# The others are the labels that are rarer, and rare tokens by chance, so that these too learn not to be drafted.
FREQUENT_SHARE = 0.75


class HeadPart:
    """The most frequent tokens, a step's labels, and others by chance: always as many rows."""

    def __init__(self, head: Tensor, counts: npt.NDArray[np.int64], size: int) -> None:
        """`counts`: how often each of the head's tokens was written."""
        if size >= len(head):
            raise ConfigError(
                f"loss_vocab_size {size:,} is no part of {len(head):,} tokens; leave it out for the loss over all"
            )
        order = torch.from_numpy(np.argsort(-counts, kind="stable")).to(head.device)
        frequent = int(size * FREQUENT_SHARE)
        self._head = head
        self._frequent, self._rare = order[:frequent].sort().values, order[frequent:].sort().values
        self._others = size - frequent
        self._place = torch.full((len(head),), -1, dtype=torch.int64, device=head.device)
        self._place[self._frequent] = torch.arange(frequent, device=head.device)

    def choose(self, labels: Tensor, known: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(rows of the head, by token its place among them or -1) for a step with these labels."""
        device = self._head.device
        # Counted, not selected: a selection would wait for the device.
        wanted = torch.zeros(len(self._head), dtype=torch.int32, device=device)
        wanted.index_add_(0, labels.flatten(), known.flatten().to(torch.int32))
        rank = torch.rand(len(self._rare), device=device, generator=generator) + (wanted[self._rare] > 0)
        chosen = self._rare[rank.topk(self._others).indices]
        place = self._place.clone()
        place[chosen] = len(self._frequent) + torch.arange(self._others, device=device)
        return self._head[torch.cat([self._frequent, chosen])], place
