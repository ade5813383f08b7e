"""Wording shared by the sub-commands."""

from __future__ import annotations


def counted(count: int, one: str, many: str | None = None) -> str:
    """Returns the number with its noun: 1 request, 1,000 requests."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
