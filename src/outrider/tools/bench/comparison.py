"""Figures of two commits, measured in pairs: ratios, their spread, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

BASE, HEAD = "base", "head"
SUSPECT_BELOW = 0.97
NOISY_ABOVE = 0.05
"""Width of a spread, relative to the ratio, from which a difference of a few per cent says nothing."""


@dataclass(slots=True)
class Measure:
    """One quantity, measured in pairs: one figure of BASE and one of HEAD for each."""

    name: str
    unit: str
    more_is_better: bool
    pairs: list[tuple[float, float]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [head / base if self.more_is_better else base / head for base, head in self.pairs]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Range of the middle half of the ratios."""
        if len(self.ratios) < 2:
            return self.ratio, self.ratio
        low, _middle, high = quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    @property
    def remark(self) -> str:
        low, high = self.spread
        noisy = "noisy" if high - low > NOISY_ABOVE * self.ratio else ""
        suspect = f"below {SUSPECT_BELOW}" if self.ratio < SUSPECT_BELOW else ""
        return ", ".join(filter(None, (suspect, noisy)))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "more_is_better": self.more_is_better,
            "base": median(base for base, _head in self.pairs),
            "head": median(head for _base, head in self.pairs),
            "ratio": self.ratio,
            "spread": list(self.spread),
            "pairs": [list(pair) for pair in self.pairs],
        }


@dataclass(slots=True)
class Comparison:
    """All measures of a run, in the order in which they first came, and how many texts were compared."""

    measures: dict[str, Measure] = field(default_factory=dict)
    texts: int = 0
    texts_that_differ: int = 0

    def add(self, name: str, unit: str, pair: Mapping[str, float], *, more_is_better: bool) -> None:
        measure = self.measures.setdefault(name, Measure(name, unit, more_is_better))
        measure.pairs.append((pair[BASE], pair[HEAD]))

    def compare_texts(self, texts: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self.texts += len(texts[BASE])
        self.texts_that_differ += sum(a != b for a, b in zip(texts[BASE], texts[HEAD], strict=True))

    def too_slow(self, least: float | None) -> list[Measure]:
        return [measure for measure in self.measures.values() if least is not None and measure.ratio < least]


def table(comparison: Comparison) -> str:
    rows = [("", "BASE", "HEAD", "ratio", "middle half", "pairs", "")]
    for measure in comparison.measures.values():
        figures = measure.as_json()
        low, high = measure.spread
        rows.append(
            (
                f"{measure.name}, {measure.unit}",
                f"{figures['base']:,.4g}",
                f"{figures['head']:,.4g}",
                f"{measure.ratio:.3f}",
                f"{low:.3f} to {high:.3f}",
                str(len(measure.pairs)),
                measure.remark,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *figures_of, remark in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(figures_of, widths[1:-1], strict=True)]
        lines.append("  ".join([f"{name:<{widths[0]}}", *cells, remark]).rstrip())
    return "\n".join(lines)
