"""The part of the head that the loss of a step uses: with a large vocabulary, most of a step is spent in the head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.errors import ConfigError

# The rest are rarer labels, and random rare tokens so that the drafter learns not to draft those either.
FREQUENT_FRACTION = 0.75


class HeadPart:
    """Chooses rows of the head, always the same number: frequent tokens, the labels of a step, and random others."""

    def __init__(self, head: Tensor, counts: npt.NDArray[np.int64], size: int) -> None:
        """`counts` holds the number of times that each of the head's tokens was written."""
        if size >= len(head):
            raise ConfigError(
                f"loss_vocab_size {size:,} must be less than the {len(head):,} tokens of the head; leave it out for all"
            )
        order = torch.from_numpy(np.argsort(-counts, kind="stable")).to(head.device)
        frequent = int(size * FREQUENT_FRACTION)
        self._head = head
        self._frequent, self._rare = order[:frequent].sort().values, order[frequent:].sort().values
        self._others = size - frequent
        self._place = torch.full((len(head),), -1, dtype=torch.int64, device=head.device)
        self._place[self._frequent] = torch.arange(frequent, device=head.device)

    def choose(self, labels: Tensor, known: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns the chosen rows of the head, and for each token its index among them or -1."""
        device = self._head.device
        # Counting instead of selecting avoids waiting for the device.
        wanted = torch.zeros(len(self._head), dtype=torch.int32, device=device)
        wanted.index_add_(0, labels.flatten(), known.flatten().to(torch.int32))
        rank = torch.rand(len(self._rare), device=device, generator=generator) + (wanted[self._rare] > 0)
        chosen = self._rare[rank.topk(self._others).indices]
        place = self._place.clone()
        place[chosen] = len(self._frequent) + torch.arange(self._others, device=device)
        return self._head[torch.cat([self._frequent, chosen])], place
