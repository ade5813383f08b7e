"""Loading of the kernels that a model needs, by the element types of its weights and caches."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outrider.backends import Progress
from outrider.backends.cpu.kernels import activations, argmax, attention, gather, linear, norm, rotate
from outrider.backends.cpu.kernels.compiling import load_all
from outrider.backends.cpu.kernels.vector import BFLOAT16, COARSE, EIGHT_BITS, FLOAT16, FLOAT32, FOUR_BITS
from outrider.backends.cpu.packed import PackedMatrix, Packing
from outrider.backends.cpu.weights import known
from outrider.models.parameters import Matrix
from outrider.models.spec import Activation

ITEMS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
PACKINGS = {Packing.FOUR_BITS: FOUR_BITS, Packing.EIGHT_BITS: EIGHT_BITS, Packing.COARSE: COARSE}
ACTIVATIONS = {
    Activation.SILU: activations.SILU,
    Activation.GELU_TANH: activations.GELU_TANH,
    Activation.CLAMPED_SWIGLU: activations.CLAMPED_SWIGLU,
}


def warm_up(kinds: Iterable[torch.dtype | Packing], progress: Progress | None = None) -> None:
    """Compiles the kernels that weights of these kinds and their caches need, or reads them from disk."""
    kinds = set(kinds)
    packed = {kind for kind in kinds if isinstance(kind, Packing)}
    items = {ITEMS[known(kind)] for kind in kinds if isinstance(kind, torch.dtype)}
    # With packed weights, the model computes and caches in float32.
    caches = items | ({FLOAT32} if packed else set())
    kernels = [norm.NORM, argmax.ARGMAX]
    stored = sorted(items | {PACKINGS[kind] for kind in packed})
    kernels += [table[item] for table in (linear.LINEAR, gather.GATHER) for item in stored if item in table]
    kernels += [table[item] for item in sorted(caches) for table in (rotate.ROTATE, attention.ATTEND)]
    load_all(kernels, progress or ignore_progress)


def ignore_progress(_what: str, _done: int, _total: int) -> None:
    pass


def item_of(weight: Matrix) -> int:
    return PACKINGS[weight.packing] if isinstance(weight, PackedMatrix) else ITEMS[known(weight.dtype)]
