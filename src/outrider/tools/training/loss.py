"""Cross entropy through a frozen head over a large vocabulary, a few rows at a time.

The gradient of the rows is computed with the loss, so that no logits outlive their chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

ChunkLoss = Callable[[Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor, Tensor, Tensor]]


class LossResult(NamedTuple):
    losses: Tensor
    """Loss of each row: [rows]."""
    confidence: Tensor
    """[rows]: the probability of the label."""
    right: Tensor
    """[rows]: whether no token is more likely than the label."""


def chunk_loss(
    logits: Tensor, labels: Tensor, teacher: Tensor | None, distil: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns losses, gradient of the logits, confidence and `right`.

    The objective is one-hot, mixed with the fraction `distil` of the teacher's distribution if there is a teacher.
    """
    wide = logits.float()
    log_sum = torch.logsumexp(wide, dim=-1)
    picked = wide.gather(1, labels[:, None])[:, 0]
    hard = log_sum - picked
    columns = torch.arange(logits.shape[1], device=logits.device)
    objective = (columns[None, :] == labels[:, None]).float()
    losses = hard
    if teacher is not None:
        soft = torch.softmax(teacher.float(), dim=-1)
        losses = (1 - distil) * hard + distil * (log_sum - (soft * wide).sum(-1))
        objective = (1 - distil) * objective + distil * soft
    gradient = torch.exp(wide - log_sum[:, None]) - objective
    return losses, gradient.to(logits.dtype), torch.exp(-hard), picked >= wide.amax(-1)


class HeadLoss:
    """The loss through a head, in chunks of rows; compiled, the work on a chunk of logits is one kernel or two."""

    def __init__(self, head: Tensor, *, chunk_rows: int, compiled: bool) -> None:
        self.head = head
        self.chunk_rows = chunk_rows
        self._chunk: ChunkLoss = torch.compile(chunk_loss, dynamic=False) if compiled else chunk_loss

    def __call__(
        self,
        rows: Tensor,
        labels: Tensor,
        teacher: Tensor | None = None,
        distil: float = 0.0,
        *,
        part: Tensor | None = None,
    ) -> LossResult:
        """Returns the loss of rows [n, hidden] for labels [n], which index the head or the given `part` of its rows."""
        matrix = self.head if part is None else part
        found = _HeadLoss.apply(rows, labels, teacher, distil, self, matrix)  # type: ignore[no-untyped-call]
        return LossResult(*found)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, labels: Tensor, teacher: Tensor | None, distil: float, head: HeadLoss, matrix: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(rows)
        losses = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        confidence = torch.empty_like(losses)
        right = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        for start in range(0, len(rows), head.chunk_rows):
            part = slice(start, start + head.chunk_rows)
            logits = rows[part].to(matrix.dtype) @ matrix.T
            teaching = None if teacher is None else teacher[part].to(matrix.dtype) @ matrix.T
            losses[part], of_logits, confidence[part], right[part] = head._chunk(logits, labels[part], teaching, distil)
            gradient[part] = of_logits @ matrix
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(confidence, right)
        return losses, confidence, right

    @staticmethod
    def backward(ctx: Any, of_losses: Tensor, *_: Any) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        # Scaled here, not in 16-bit logits, where small weights of a large batch would lose precision.
        return (gradient.float() * of_losses[:, None]).to(gradient.dtype), None, None, None, None, None
