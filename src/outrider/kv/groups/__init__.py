"""Kinds of KV group. A new kind is one new file and one line in KINDS."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.errors import ConfigError
from outrider.kv.groups.base import GroupKind
from outrider.kv.groups.full import Full
from outrider.kv.groups.sliding import Sliding

KINDS: dict[str, type[GroupKind]] = {"full": Full, "sliding": Sliding}


def group_kind(name: str, options: Mapping[str, int]) -> GroupKind:
    """Build a kind from plain data, as traces and configuration files hold it."""
    if name not in KINDS:
        raise ConfigError(f"unknown group kind {name!r}; known kinds: {', '.join(sorted(KINDS))}")
    try:
        return KINDS[name](**options)
    except TypeError as error:
        raise ConfigError(f"group kind {name!r} does not take {dict(options)!r}: {error}") from error


__all__ = ["KINDS", "Full", "GroupKind", "Sliding", "group_kind"]
