"""The number of threads that PyTorch uses, changed for a while."""

from __future__ import annotations

import torch


class torch_threads:  # noqa: N801 - used as a statement
    """Gives PyTorch this many threads inside the `with` statement."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._number)

    def __exit__(self, *_error: object) -> None:
        torch.set_num_threads(self._before)
