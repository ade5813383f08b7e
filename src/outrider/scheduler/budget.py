"""The token budget of one step: who may use how many rows."""

from __future__ import annotations

from outrider.kv.footprint import KVFootprint


def drafts_for_share(footprint: KVFootprint, k: int, share_rows: int) -> int:
    """The most drafts, at most k, that one decoding request can verify and propose again within its share.

    A step of a request costs its own row, the drafts it verifies, and the rows that propose the next ones;
    all of them count.
    """
    while k > 0 and 1 + k + footprint.draft_rows(k) > share_rows:
        k -= 1
    return k


class StepBudget:
    """Rows left in a step, and the share of each decoding request."""

    __slots__ = ("left", "share_rows")

    def __init__(self, rows: int, *, decoding: int, prompt_rows: int) -> None:
        """prompt_rows: the fewest rows that let a prompt under way, or at the door, make progress."""
        self.left = rows
        kept = max(prompt_rows, rows // 8) if prompt_rows else 0
        self.share_rows = max(1, (rows - kept) // decoding) if decoding else rows
