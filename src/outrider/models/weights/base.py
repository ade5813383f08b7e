"""Checkpoints of any format, and the filling of a decoder's tensors from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.parameters import DecoderParameters, DenseMLP, ExpertsMLP, LayerParameters, Linear, Matrix, plain
from outrider.models.recipes.base import Recipe
from outrider.models.recipes.layout import Layout, Part, Shape
from outrider.models.spec import DecoderSpec, LayerSpec
from outrider.models.weight_forms import DENSE, Bytes, MatrixForm, WeightForms

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes), counted in stored bytes."""

NAMES_SHOWN = 8
MODULES_MAX = 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The description of a tensor in a checkpoint, known without reading the tensor."""

    shape: Shape
    stored_bytes: int
    stored_type: str = ""
    """The file format's name for the element type."""
    rows: Callable[[], Bytes] | None = None
    """Reads a quantised matrix as it is stored: one row of blocks for each row of the matrix."""


class TensorSource(Protocol):
    """A source of tensors by name."""

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
    """Whether norms are stored with the constant that their family adds to them already added."""

    @abstractmethod
    def copy_into(self, part: Part, destination: Tensor) -> None:
        """Writes the part of a tensor that `part` takes into a destination of the same shape, of any dtype and on any
        device."""

    def stored_name(self, name: str) -> str:
        """Returns the name of a tensor in the file, for messages."""
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
    forms: WeightForms = DENSE,
) -> DecoderParameters:
    """Returns every tensor of the decoder, fused. A checkpoint that does not fit is refused before any tensor is
    read."""
    layout = checkpoint.recipe.layout(spec)
    if checkpoint.complete_norms:
        layout = {path: replace(assembly, plus=0.0) for path, assembly in layout.items()}
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
    return _parameters(spec, filled)


def fill(
    source: TensorSource,
    layout: Layout,
    *,
    what: str,
    harmless: Callable[[str], bool],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    forms: WeightForms = DENSE,
) -> dict[str, Matrix]:
    """Returns every tensor of a layout, by its path there. `what` names the model in messages. Tensors that the layout
    does not use are refused unless they are `harmless`. Matrices for which `forms` has a form are kept in it, all
    others in `dtype`."""
    found = source.tensors
    plan = {path: _choose(assembly.choices, found) for path, assembly in layout.items()}
    _refuse_misfits(source, what, harmless, [part for parts in plan.values() for part in parts])
    total_bytes = sum(found[part.name].stored_bytes for parts in plan.values() for part in parts)
    done_bytes = 0
    filled: dict[str, Matrix] = {}
    chosen = {
        path: torch.float32
        if assembly.wide
        else _form(assembly.shape, [found[part.name] for part in plan[path]], forms)
        for path, assembly in layout.items()
    }
    sizes = {path: _in_memory(layout[path].shape, form or dtype) for path, form in chosen.items()}
    total_size = sum(prod(shape) * kind.itemsize for shape, kind in sizes.values())
    memory = forms.allocate(total_size, len(layout), torch.device(device))
    for path, parts in plan.items():
        shape, form, block = layout[path].shape, chosen[path], memory.empty(*sizes[path])
        rows = block[: shape[0]]
        for part in parts:
            destination = rows[part.where] if part.where else rows
            if isinstance(form, MatrixForm):
                _write_stored(found[part.name], form, destination)
            else:
                source.copy_into(part, destination)
            done_bytes += found[part.name].stored_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)
        if layout[path].plus:
            block += layout[path].plus
        filled[path] = form.matrix(block, shape) if isinstance(form, MatrixForm) else block
    return filled


def _write_stored(tensor: StoredTensor, form: MatrixForm, destination: Tensor) -> None:
    assert tensor.rows is not None, f"{tensor.stored_type} is not stored in blocks"
    form.write(tensor.rows(), tensor.stored_type, destination)


def taken(tensor: Tensor, part: Part) -> Tensor:
    """Returns a view of the part of a tensor that `part` takes."""
    ordered = tensor.transpose(-1, -2) if part.transposed else tensor
    return ordered[part.take] if part.take else ordered


def _in_memory(shape: Shape, form: MatrixForm | torch.dtype) -> tuple[Shape, torch.dtype]:
    return (tuple(shape), form) if isinstance(form, torch.dtype) else form.memory(tuple(shape))


def _form(shape: Shape, parts: Sequence[StoredTensor], forms: WeightForms) -> MatrixForm | torch.dtype | None:
    """Returns the form in which all parts of a matrix can be kept; None if there is none."""
    possible = {forms.form_of(part.stored_type) for part in parts}
    form = possible.pop()
    # Blocks make up a single matrix; 16-bit numbers may also make up the matrices of many experts.
    dimensions_max = 2 if isinstance(form, MatrixForm) else 3
    return form if not possible and 2 <= len(shape) <= dimensions_max else None


def _choose(choices: tuple[tuple[Part, ...], ...], names: Mapping[str, StoredTensor]) -> tuple[Part, ...]:
    """Returns the choice of parts that fits the names in the checkpoint best; the first of several that fit equally."""
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
    """Returns whether a tensor is a rotary table, which older checkpoints carry."""
    return name.endswith((".rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))


def _harmless(name: str, spec: DecoderSpec, modules: int) -> bool:
    """Returns whether a tensor may be left unused: a rotary table, a copy of the embedding where the head is tied to
    it, or part of a module that predicts further tokens. Such modules are beside the model or, `modules` of them, after
    its last layer."""
    behind = tuple(f"model.layers.{len(spec.layers) + number}." for number in range(min(modules, MODULES_MAX)))
    return rotary_buffer(name) or (spec.tied_head and name == "lm_head.weight") or name.startswith(("mtp.", *behind))


def _named(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def layers_from(layers: tuple[LayerSpec, ...], filled: Mapping[str, Matrix]) -> tuple[LayerParameters, ...]:
    """Returns the layers among the tensors of a filled layout."""

    def tensor(path: str) -> Tensor:
        return plain(filled[path])

    def optional(path: str) -> Tensor | None:
        return tensor(path) if path in filled else None

    def linear(path: str) -> Linear:
        return Linear(weight=filled[f"{path}.weight"], bias=optional(f"{path}.bias"))

    def mlp(path: str, *, experts: bool) -> DenseMLP | ExpertsMLP:
        if not experts:
            return DenseMLP(gate_up=linear(f"{path}.gate_up"), down=linear(f"{path}.down"))
        return ExpertsMLP(
            router=linear(f"{path}.router"),
            gate_up=tensor(f"{path}.gate_up"),
            down=tensor(f"{path}.down"),
            gate_up_bias=optional(f"{path}.gate_up_bias"),
            down_bias=optional(f"{path}.down_bias"),
        )

    return tuple(
        LayerParameters(
            input_norm=tensor(f"layers.{n}.input_norm"),
            qkv=linear(f"layers.{n}.qkv"),
            out=linear(f"layers.{n}.out"),
            mlp_norm=tensor(f"layers.{n}.mlp_norm"),
            mlp=mlp(f"layers.{n}.mlp", experts=layer.experts is not None),
            q_norm=optional(f"layers.{n}.q_norm"),
            k_norm=optional(f"layers.{n}.k_norm"),
            attention_post_norm=optional(f"layers.{n}.attention_post_norm"),
            mlp_post_norm=optional(f"layers.{n}.mlp_post_norm"),
            sinks=optional(f"layers.{n}.sinks"),
        )
        for n, layer in enumerate(layers)
    )


def _parameters(spec: DecoderSpec, filled: Mapping[str, Matrix]) -> DecoderParameters:
    embedding = filled["embedding"]
    head_bias = plain(filled["head.bias"]) if "head.bias" in filled else None
    return DecoderParameters(
        embedding=embedding,
        layers=layers_from(spec.layers, filled),
        final_norm=plain(filled["final_norm"]),
        head=Linear(weight=embedding if spec.tied_head else filled["head.weight"], bias=head_bias),
    )
