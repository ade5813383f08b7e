"""Checkpoints: Hugging Face directories and GGUF files behind one interface."""

from __future__ import annotations

from pathlib import Path

from outrider.models.weights.base import Checkpoint, Progress, load_parameters
from outrider.models.weights.gguf import GGUFCheckpoint
from outrider.models.weights.safetensors import SafetensorsCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a directory or a GGUF file. Reads headers only."""
    return SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)


__all__ = ["Checkpoint", "GGUFCheckpoint", "Progress", "SafetensorsCheckpoint", "load_parameters", "open_checkpoint"]
