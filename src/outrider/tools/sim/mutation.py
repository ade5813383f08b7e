"""One mutation: a small patch of the real code that puts a real bug back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Change = Callable[[Any], Any]
PACE = "I12"
"""The invariant that the pacing campaign checks, on machines instead of scenarios."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    name: str
    invariant: str
    story: str
    where: str
    change: Change
    """Function that takes the original and returns its replacement."""
    needs: frozenset[str] = frozenset()
    """Traits that a scenario must have to exercise the mutation; see outrider.tools.sim.mutations."""
    lineage: str = ""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Patch for the duration of a with-block."""
        module_name, path = self.where.split(":")
        owner: Any = import_module(module_name)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = owner.__dict__[attribute]
        setattr(owner, attribute, self.change(original))
        try:
            yield
        finally:
            setattr(owner, attribute, original)


def needs(*traits: str) -> frozenset[str]:
    return frozenset(traits)
