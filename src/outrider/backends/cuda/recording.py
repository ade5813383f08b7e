"""What a graph does, where there is no GPU: the launches of a pass are recorded, and the recorded list is replayed.

A replay runs none of the pass's Python. A number that the host read while the pass was recorded is therefore stale in
the replay, and memory that the recording did not declare is not updated, as with a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from outrider.backends.cuda.launching import Launch, observed, run

Result = TypeVar("Result")


class RecordedPass:
    def __init__(self) -> None:
        self.entries: list[Callable[[], None]] = []

    def record(self, call: Callable[[], Result]) -> Result:
        with observed(self._launched), _Operations(self.entries):
            return call()

    def replay(self) -> None:
        for entry in self.entries:
            entry()

    def _launched(self, launched: Launch) -> None:
        # The interpreter's own tensor operations are no part of the pass.
        with _disable_current_modes():
            run(launched)
        self.entries.append(lambda: run(launched))


class _Operations(TorchDispatchMode):
    """Records PyTorch's operations with the tensors that they returned."""

    def __init__(self, entries: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries = entries

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default,):
            raise RuntimeError("a captured pass may not read a tensor on the host")
        result = func(*args, **kwargs)
        inputs = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        outputs = _tensors(result)
        views = all(each.untyped_storage().data_ptr() in inputs for each in outputs)
        if func._schema.is_mutable:
            self._entries.append(lambda: func(*args, **kwargs))
        elif not views and "empty" not in func.__name__:
            self._entries.append(lambda: _write(outputs, _tensors(func(*args, **kwargs))))
        return result


def _write(outputs: list[Tensor], found: list[Tensor]) -> None:
    for out, value in zip(outputs, found, strict=True):
        out.copy_(value)


def _tensors(thing: Any) -> list[Tensor]:
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        thing = tuple(thing.values())
    if isinstance(thing, list | tuple):
        return [tensor for each in thing for tensor in _tensors(each)]
    return []
