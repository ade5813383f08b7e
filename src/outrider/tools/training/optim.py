"""Optimisers and the learning-rate schedule.

Matrices are trained by Muon (the momentum, made orthogonal) or AdamW, vectors always by AdamW. Muon's steps are
scaled to the size of AdamW's, so that one learning rate serves both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
ADAMW_BETAS = (0.9, 0.95)
MUON_MOMENTUM = 0.95
# An orthogonal n × m matrix has elements of about 1 / sqrt(max(n, m)); AdamW's steps are about 0.2.
ADAMW_STEP_SIZE = 0.2


def orthogonalise(matrices: Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """Returns an approximation of the nearest (semi-)orthogonal matrix to each of [count, rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if tall:
        x = x.mT
    assert isinstance(x, Tensor)
    return x


class Muon(torch.optim.Optimizer):
    """The Muon optimiser. Matrices of one shape are updated in one batch: there are many, and each is small."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(list(parameters), {"lr": lr, "weight_decay": weight_decay, "momentum": MUON_MOMENTUM})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Muon does not evaluate the loss itself"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_batch(shape, parameters, group)

    def _step_batch(self, shape: torch.Size, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        momenta = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            momenta.append(state["momentum"])
        keep = group["momentum"]
        torch._foreach_lerp_(momenta, gradients, 1 - keep)
        # Nesterov: look one step ahead.
        ahead = torch._foreach_lerp(gradients, momenta, keep)
        update = orthogonalise(torch.stack(tuple(ahead)))
        size = ADAMW_STEP_SIZE * math.sqrt(max(shape))
        matrices: list[Tensor] = list(parameters)
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(matrices, list(update.to(matrices[0].dtype).unbind()), alpha=-group["lr"] * size)


class Optimisers:
    """All optimisers of a network as one."""

    def __init__(self, network: nn.Module, *, kind: str, lr: float, weight_decay: float) -> None:
        matrices = [parameter for parameter in network.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in network.parameters() if parameter.dim() < 2]
        fused = any(parameter.is_cuda for parameter in vectors)
        groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}]
        if kind == "adamw":
            groups.append({"params": matrices, "weight_decay": weight_decay})
        adamw = torch.optim.AdamW(groups, lr=lr, betas=ADAMW_BETAS, fused=fused)
        self.members: list[torch.optim.Optimizer] = [adamw]
        if kind == "muon":
            self.members.append(Muon(matrices, lr=lr, weight_decay=weight_decay))

    def set_lr(self, lr: float) -> None:
        for member in self.members:
            for group in member.param_groups:
                group["lr"] = lr

    def step(self) -> None:
        for member in self.members:
            member.step()

    def zero_grad(self) -> None:
        for member in self.members:
            member.zero_grad(set_to_none=True)

    def state(self) -> list[Any]:
        return [member.state_dict() for member in self.members]

    def load_state(self, states: list[Any]) -> None:
        for member, state in zip(self.members, states, strict=True):
            member.load_state_dict(state)


def learning_rate(peak: float, *, step: int, warmup_steps: int, progress: float, floor: float = 0.02) -> float:
    """Returns the rate after a linear warm-up and half a cosine down to `floor`; `progress` runs from 0 to 1."""
    start = min(1.0, (step + 1) / max(1, warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    return peak * start * (floor + (1 - floor) * cosine)
