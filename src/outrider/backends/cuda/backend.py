"""The CUDA backend: the reference's arithmetic on a GPU, with a fused draw."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.backends.base import Backend
from outrider.backends.drawing import DrawSettings
from outrider.backends.reference.backend import ReferenceBackend
from outrider.backends.reference.draw import kept_tokens
from outrider.backends.registry import BackendSettings


class CudaBackend(ReferenceBackend):
    name = "cuda"

    def draw(self, logits: Tensor, settings: DrawSettings) -> Tensor:
        # Imported on use: Triton comes with PyTorch's CUDA builds only.
        from outrider.backends.cuda.draw import pick

        kept = kept_tokens(logits, settings) if settings.filters else None
        top = logits.amax(dim=-1)
        return pick(logits, top, settings.temperature, settings.log_min_p, settings.key, kept)

    def free_kv_bytes(self, memory_utilization: float) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, int(free - total * (1 - memory_utilization)))

    def check_kv_bytes(self, kv_bytes: int) -> None:
        """Checks nothing: on a GPU the allocation itself fails."""


def unavailable(settings: BackendSettings) -> str | None:
    return None if settings.device.type == "cuda" else f"it needs a GPU, but the device is {settings.device}"


def build(settings: BackendSettings) -> Backend:
    return CudaBackend(settings.device)
