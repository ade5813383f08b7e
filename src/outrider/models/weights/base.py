"""A checkpoint, whatever its format, and how a decoder's tensors are filled from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.packed import BLOCK, PackedMatrix, Packing, filled_up, weave
from outrider.models.parameters import DecoderParameters, DenseMLP, ExpertsMLP, LayerParameters, Linear, Matrix
from outrider.models.recipes.base import Recipe
from outrider.models.recipes.layout import Layout, Part, Shape
from outrider.models.spec import DecoderSpec, LayerSpec
from outrider.models.weights.memory import WeightMemory

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes), counted as they are stored."""

Form = Packing | torch.dtype
"""How a matrix can lie in memory."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """So many rows, woven together: see `PackedMatrix`."""

    packing: Packing
    count: int


Place = PackedRows | torch.dtype
"""How one does."""

NAMES_SHOWN = 8
MODULES_MAX = 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a checkpoint says about a tensor without reading it."""

    shape: Shape
    stored_bytes: int
    form: Form | None = None
    """The form in which it can stay in memory without a loss; None where it can only be converted."""


class TensorSource(Protocol):
    """Where tensors come from, by name."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def copy_into(self, part: Part, destination: Tensor) -> None: ...

    def stored_name(self, name: str) -> str: ...


class Checkpoint(ABC):
    """A model's configuration and tensors, under the names Hugging Face gives them."""

    path: Path
    config: Mapping[str, Any]
    config_source: str
    """The file that `config` came from, for messages."""
    recipe: Recipe
    tensors: Mapping[str, StoredTensor]
    complete_norms: bool = False
    """Norms have been stored with what their family adds to them."""

    @abstractmethod
    def copy_into(self, part: Part, destination: Tensor) -> None:
        """Write what the part takes of a tensor, in the destination's dtype, into a destination of its shape on any
        device. A destination of bytes takes its packed rows."""

    def stored_name(self, name: str) -> str:
        """What the file itself calls a tensor, for messages."""
        return name

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = self.tensors[name].shape
        destination = torch.empty(shape, dtype=dtype)
        self.copy_into(Part(name, shape), destination)
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
    as_stored: bool = False,
) -> DecoderParameters:
    """Every tensor of the decoder, in place and fused. What does not fit is refused before anything is read.

    `as_stored`: matrices that the checkpoint stores in fewer bits stay so, to be widened where they are used."""
    layout = checkpoint.recipe.layout(spec)
    if checkpoint.complete_norms:
        layout = {path: replace(assembly, plus=0.0) for path, assembly in layout.items()}
    forms = stored_forms(checkpoint, layout) if as_stored else {}
    modules = checkpoint.config.get("num_nextn_predict_layers")
    filled = fill(
        checkpoint,
        layout,
        what=f"a {spec.family} model",
        harmless=lambda name: (
            name.startswith(checkpoint.recipe.other_parts)
            or _harmless(name, spec, modules if isinstance(modules, int) else 0)
        ),
        dtype=dtype,
        device=device,
        progress=progress,
        forms=forms,
    )
    return _parameters(spec, filled, forms)


def fill(
    source: TensorSource,
    layout: Layout,
    *,
    what: str,
    harmless: Callable[[str], bool],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    forms: Mapping[str, Place] | None = None,
) -> dict[str, Tensor]:
    """Every tensor of a layout, by its path there. `what` says in messages what the tensors should make up;
    tensors that the layout has no use for are refused unless they are `harmless`. Paths in `forms` get
    that form instead of `dtype`; packed ones are woven bytes here."""
    forms = forms or {}
    found = source.tensors
    plan = {path: _choose(assembly.choices, found) for path, assembly in layout.items()}
    _refuse_misfits(source, what, harmless, [part for parts in plan.values() for part in parts])
    total_bytes = sum(found[part.name].stored_bytes for parts in plan.values() for part in parts)
    done_bytes = 0
    filled: dict[str, Tensor] = {}
    kinds = {
        path: _kind_in_memory(assembly.shape, torch.float32 if assembly.wide else forms.get(path, dtype))
        for path, assembly in layout.items()
    }
    size = sum(prod(shape) * kind.itemsize for shape, kind in kinds.values())
    memory = WeightMemory(size, len(layout), torch.device(device))
    for path, parts in plan.items():
        destination = filled[path] = memory.empty(*kinds[path])
        form = forms.get(path)
        rows = destination[: form.count] if isinstance(form, PackedRows) else destination
        for part in parts:
            source.copy_into(part, rows[part.where] if part.where else rows)
            done_bytes += found[part.name].stored_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)
        if layout[path].plus:
            destination += layout[path].plus
        if isinstance(form, PackedRows):
            weave(form.packing, destination, form.count)
    return filled


def taken(tensor: Tensor, part: Part) -> Tensor:
    """What a part takes of its tensor: a view."""
    ordered = tensor.transpose(-1, -2) if part.transposed else tensor
    return ordered[part.take] if part.take else ordered


def _kind_in_memory(shape: Shape, form: Place) -> tuple[Shape, torch.dtype]:
    if isinstance(form, torch.dtype):
        return tuple(shape), form
    return (filled_up(form.count), shape[1] // BLOCK * form.packing.block_bytes), torch.uint8


def stored_forms(source: TensorSource, layout: Layout) -> dict[str, Place]:
    """Of the matrices that can stay as they are stored: all parts in the same form."""
    found: dict[str, Place] = {}
    for path, assembly in layout.items():
        parts = _choose(assembly.choices, source.tensors)
        forms = {source.tensors[part.name].form if part.name in source.tensors else None for part in parts}
        form = forms.pop()
        # Packed rows make up one matrix; numbers of 16 bits may be those of many experts.
        dimensions_max = 2 if isinstance(form, Packing) else 3
        if form is not None and not forms and 2 <= len(assembly.shape) <= dimensions_max:
            found[path] = PackedRows(form, assembly.shape[0]) if isinstance(form, Packing) else form
    return found


def _choose(choices: tuple[tuple[Part, ...], ...], names: Mapping[str, StoredTensor]) -> tuple[Part, ...]:
    """The way of filling that the checkpoint's names fit best; the first one where none fits better."""
    return max(choices, key=lambda parts: sum(part.name in names for part in parts) / len(parts))


def _refuse_misfits(source: TensorSource, what: str, harmless: Callable[[str], bool], parts: list[Part]) -> None:
    found = source.tensors
    problems = []
    missing = [source.stored_name(part.name) for part in parts if part.name not in found]
    if missing:
        problems.append(f"missing {_named(missing)}")
    misshapen = [
        f"{source.stored_name(part.name)} (found {list(found[part.name].shape)}, expected {list(part.shape)})"
        for part in parts
        if part.name in found and found[part.name].shape != part.shape
    ]
    if misshapen:
        problems.append(f"misshapen {_named(misshapen)}")
    extra = found.keys() - {part.name for part in parts}
    unexpected = sorted(source.stored_name(name) for name in extra if not harmless(name))
    if unexpected:
        problems.append(f"unexpected {_named(unexpected)}")
    if problems:
        raise ModelError(f"{source.path} does not fit its configuration as {what}: {'; '.join(problems)}")


def rotary_buffer(name: str) -> bool:
    """Rotary tables that older checkpoints carry."""
    return name.endswith((".rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))


def _harmless(name: str, spec: DecoderSpec, modules: int) -> bool:
    """Rotary tables, a copy of the embedding where the head is tied to it, and modules that predict further tokens:
    these lie beside the model or, so many of them, behind its last layer."""
    behind = tuple(f"model.layers.{len(spec.layers) + number}." for number in range(min(modules, MODULES_MAX)))
    return rotary_buffer(name) or (spec.tied_head and name == "lm_head.weight") or name.startswith(("mtp.", *behind))


def _named(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def layers_from(
    layers: tuple[LayerSpec, ...], filled: Mapping[str, Tensor], forms: Mapping[str, Place] | None = None
) -> tuple[LayerParameters, ...]:
    """The layers among the tensors of a filled layout."""

    def linear(path: str) -> Linear:
        return Linear(weight=_matrix(f"{path}.weight", filled, forms or {}), bias=filled.get(f"{path}.bias"))

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

    return tuple(
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
        for n, layer in enumerate(layers)
    )


def _matrix(path: str, filled: Mapping[str, Tensor], forms: Mapping[str, Place]) -> Matrix:
    form = forms.get(path)
    if not isinstance(form, PackedRows):
        return filled[path]
    return PackedMatrix(packing=form.packing, data=filled[path], count=form.count)


def _parameters(spec: DecoderSpec, filled: Mapping[str, Tensor], forms: Mapping[str, Place]) -> DecoderParameters:
    embedding = _matrix("embedding", filled, forms)
    head = embedding if spec.tied_head else _matrix("head.weight", filled, forms)
    return DecoderParameters(
        embedding=embedding,
        layers=layers_from(spec.layers, filled, forms),
        final_norm=filled["final_norm"],
        head=Linear(weight=head, bias=filled.get("head.bias")),
    )
