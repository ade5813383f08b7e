"""A checkpoint, whatever its format, and how a decoder's tensors are filled from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.parameters import DecoderParameters, DenseMLP, ExpertsMLP, LayerParameters, Linear
from outrider.models.recipes.base import Recipe
from outrider.models.recipes.layout import Part, Shape
from outrider.models.spec import DecoderSpec

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes), counted as they are stored."""

NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a checkpoint says about a tensor without reading it."""

    shape: Shape
    stored_bytes: int


class Checkpoint(ABC):
    """A model's configuration and tensors, under the names Hugging Face gives them."""

    path: Path
    config: Mapping[str, Any]
    config_source: str
    """The file that `config` came from, for messages."""
    recipe: Recipe
    tensors: Mapping[str, StoredTensor]

    @abstractmethod
    def copy_into(self, name: str, destination: Tensor) -> None:
        """Write a tensor, in the destination's dtype, into a destination of its shape on any device."""

    def stored_name(self, name: str) -> str:
        """What the file itself calls a tensor, for messages."""
        return name

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        destination = torch.empty(self.tensors[name].shape, dtype=dtype)
        self.copy_into(name, destination)
        return destination

    def spec(self) -> DecoderSpec:
        return self.recipe.spec(self.config, self.config_source)


def load_parameters(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> DecoderParameters:
    """Every tensor of the decoder, in place and fused. What does not fit is refused before anything is read."""
    layout = checkpoint.recipe.layout(spec)
    plan = {path: _choose(assembly.choices, checkpoint.tensors) for path, assembly in layout.items()}
    _refuse_misfits(checkpoint, spec, [part for parts in plan.values() for part in parts])
    total_bytes = sum(checkpoint.tensors[part.name].stored_bytes for parts in plan.values() for part in parts)
    done_bytes = 0
    filled: dict[str, Tensor] = {}
    for path, parts in plan.items():
        destination = filled[path] = torch.empty(layout[path].shape, dtype=dtype, device=device)
        for part in parts:
            checkpoint.copy_into(part.name, destination[part.where] if part.where else destination)
            done_bytes += checkpoint.tensors[part.name].stored_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    return _parameters(spec, filled)


def _choose(choices: tuple[tuple[Part, ...], ...], names: Mapping[str, StoredTensor]) -> tuple[Part, ...]:
    """The way of filling that the checkpoint's names fit best; the first one where none fits better."""
    return max(choices, key=lambda parts: sum(part.name in names for part in parts) / len(parts))


def _refuse_misfits(checkpoint: Checkpoint, spec: DecoderSpec, parts: list[Part]) -> None:
    found = checkpoint.tensors
    problems = []
    missing = [checkpoint.stored_name(part.name) for part in parts if part.name not in found]
    if missing:
        problems.append(f"missing {_named(missing)}")
    misshapen = [
        f"{checkpoint.stored_name(part.name)} (found {list(found[part.name].shape)}, expected {list(part.shape)})"
        for part in parts
        if part.name in found and found[part.name].shape != part.shape
    ]
    if misshapen:
        problems.append(f"misshapen {_named(misshapen)}")
    extra = found.keys() - {part.name for part in parts}
    unexpected = sorted(checkpoint.stored_name(name) for name in extra if not _harmless(name, spec))
    if unexpected:
        problems.append(f"unexpected {_named(unexpected)}")
    if problems:
        raise ModelError(
            f"{checkpoint.path} does not fit its configuration as a {spec.family} model: {'; '.join(problems)}"
        )


def _harmless(name: str, spec: DecoderSpec) -> bool:
    """Rotary tables that older checkpoints carry, and a copy of the embedding where the head is tied to it."""
    return name.endswith((".rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")) or (
        spec.tied_head and name == "lm_head.weight"
    )


def _named(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _parameters(spec: DecoderSpec, filled: Mapping[str, Tensor]) -> DecoderParameters:
    def linear(path: str) -> Linear:
        return Linear(weight=filled[f"{path}.weight"], bias=filled.get(f"{path}.bias"))

    def mlp(path: str, *, experts: bool) -> DenseMLP | ExpertsMLP:
        if not experts:
            return DenseMLP(gate_up=linear(f"{path}.gate_up"), down=linear(f"{path}.down"))
        return ExpertsMLP(
            router=linear(f"{path}.router"),
            gate_up=filled[f"{path}.gate_up"],
            down=filled[f"{path}.down"],
            gate_up_bias=filled.get(f"{path}.gate_up_bias"),
            down_bias=filled.get(f"{path}.down_bias"),
        )

    layers = tuple(
        LayerParameters(
            input_norm=filled[f"layers.{n}.input_norm"],
            qkv=linear(f"layers.{n}.qkv"),
            out=linear(f"layers.{n}.out"),
            mlp_norm=filled[f"layers.{n}.mlp_norm"],
            mlp=mlp(f"layers.{n}.mlp", experts=layer.experts is not None),
            q_norm=filled.get(f"layers.{n}.q_norm"),
            k_norm=filled.get(f"layers.{n}.k_norm"),
            attention_post_norm=filled.get(f"layers.{n}.attention_post_norm"),
            mlp_post_norm=filled.get(f"layers.{n}.mlp_post_norm"),
            sinks=filled.get(f"layers.{n}.sinks"),
        )
        for n, layer in enumerate(spec.layers)
    )
    embedding = filled["embedding"]
    return DecoderParameters(
        embedding=embedding,
        layers=layers,
        final_norm=filled["final_norm"],
        head=Linear(weight=embedding) if spec.tied_head else linear("head"),
    )
