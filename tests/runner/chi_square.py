"""Chi-square tests for fixed seeds: they pass or fail the same way every time."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def chi_square_p(counts: Sequence[float], expected: Sequence[float]) -> float:
    """How likely counts at least this far from the expected ones are. Rare outcomes are put together."""
    small, pairs = [0.0, 0.0], []
    for count, wanted in zip(counts, expected, strict=True):
        if wanted >= 8:
            pairs.append((count, wanted))
        else:
            small = [small[0] + count, small[1] + wanted]
    if small[1] >= 8:
        pairs.append((small[0], small[1]))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in pairs)
    degrees = len(pairs) - 1
    assert degrees >= 1
    return float(
        torch.special.gammaincc(
            torch.tensor(degrees / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
        )
    )


def uniform_p(cells: torch.Tensor, num_cells: int) -> float:
    """For whole numbers that should fall into every cell equally often."""
    counts = torch.bincount(cells.flatten(), minlength=num_cells).tolist()
    return chi_square_p(counts, [cells.numel() / num_cells] * num_cells)
