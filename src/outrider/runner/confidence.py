"""How sure a drafter is of its drafts.

The share of its most likely token says how often a draft at that place is accepted, whether tokens are drawn or
simply the likeliest: measured on the shipped drafters, the two agree within a few hundredths. So the product of these
shares says how likely all drafts so far are right, and where another row to verify no longer pays.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor


def largest_shares(logits: Tensor) -> list[float]:
    """For each row, the probability of its most likely token."""
    if logits.device.type == "cpu":
        # Several times as fast as torch's for a few rows.
        array = logits.numpy()
        weights = np.exp(array - array.max(axis=-1, keepdims=True))
        shares: list[float] = (1.0 / weights.sum(axis=-1)).tolist()
        return shares
    return logits.softmax(dim=-1).amax(dim=-1).tolist()
