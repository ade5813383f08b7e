"""A run's state on disk, written whole or not at all, so that a killed run resumes from its last one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ConfigError

STATE_FILE = "training-state.pt"
FORMAT = 3


def save_state(directory: Path, state: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / STATE_FILE
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_state(directory: Path) -> dict[str, Any] | None:
    """Returns the saved state; None if there is none."""
    path = directory / STATE_FILE
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:
        # A damaged file makes torch.load raise nearly anything.
        reason = str(problem).partition("\n")[0]
        raise ConfigError(f"{path} cannot be read ({reason}); start again with --fresh") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a state that this version can continue; start again with --fresh")
    return state


def refuse_other_run(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Refuses a state of a run that trained another network or in another way."""
    different = [name for name in wanted if saved.get(name) != wanted[name]]
    if different:
        listed = ", ".join(f"{name} was {saved.get(name)}, now {wanted[name]}" for name in different)
        raise ConfigError(f"{path} holds another run ({listed}): use another --output, or start again with --fresh")
