"""A run's state on disk: written whole or not at all, so that a killed run goes on from its last one."""

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
    """None where there is nothing to go on from."""
    path = directory / STATE_FILE
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:
        # A damaged file makes torch.load raise nearly anything.
        reason = str(problem).partition("\n")[0]
        raise ConfigError(f"{path} cannot be read ({reason}); begin anew with --fresh") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ConfigError(f"{path} is no state that this version can continue; begin anew with --fresh")
    return state


def refuse_other_run(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """A state can be continued only by a run that trains the same network in the same way."""
    different = [name for name in wanted if saved.get(name) != wanted[name]]
    if different:
        told = ", ".join(f"{name} was {saved.get(name)}, now {wanted[name]}" for name in different)
        raise ConfigError(f"{path} holds another run ({told}): use another output, or begin anew with --fresh")
