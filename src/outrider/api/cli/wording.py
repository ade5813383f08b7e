"""Words that every sub-command needs."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """The number and its noun: 1 request, 1,000 requests."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
