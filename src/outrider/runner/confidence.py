"""How sure a drafter is of its drafts.

The share of its most likely token says how often a draft at that place is accepted, whether tokens are drawn or
simply the likeliest: measured on the shipped drafters, the two agree within a few hundredths. So the product of these
shares says how likely all drafts so far are right, and where another row to verify no longer pays.
"""

from __future__ import annotations

from torch import Tensor

from outrider.layers.ops import Ops


def largest_shares(logits: Tensor, ops: Ops) -> list[float]:
    """For each row, the probability of its most likely token."""
    if ops.own_threads:
        from outrider.kernels.shares import largest_shares as compiled

        found = compiled(logits)
    else:
        found = logits.softmax(dim=-1).amax(dim=-1)
    shares: list[float] = found.tolist()
    return shares
