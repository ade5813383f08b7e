"""Words that every sub-command needs."""

from __future__ import annotations


def counted(count: int, one: str, many: str | None = None) -> str:
    """The number and its noun: 1 request, 1,000 requests."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
