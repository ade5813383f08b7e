"""Line charts as SVG, from the standard library alone: panels with axes, lines with markers, and a legend for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

PANEL_WIDTH, PANEL_HEIGHT = 420, 260
COLUMNS_MAX = 2
PAGE_MARGIN = 28
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 40, 46
"""Room around the plotted area of a panel: for the numbers of the axes, and for the titles."""
HEADER_HEIGHT, LEGEND_ROW_HEIGHT = 58, 22
INK, FAINT_INK, GRID, PAPER = "#1f2933", "#616e7c", "#e4e7eb", "#ffffff"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Helvetica, Arial, sans-serif"
CHARACTER_WIDTH = 6.9
"""Width of a character of the legend, on average, since a text cannot be measured here."""
TICKS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    x: float
    y: float
    low: float
    high: float
    """Ends of the range that is drawn behind the point; both equal to y for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    name: str
    color: str
    points: tuple[Point, ...]
    dashed: bool = False
    bold: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    title: str
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    logarithmic: bool = True
    """Whether doubling x is always the same distance."""


def chart(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """Returns the picture: at most two panels beside each other, under one legend."""
    columns = min(COLUMNS_MAX, max(1, len(panels)))
    width = 2 * PAGE_MARGIN + columns * PANEL_WIDTH
    legend, legend_height = _legend(panels, width)
    top = PAGE_MARGIN + HEADER_HEIGHT + legend_height
    height = top + math.ceil(len(panels) / columns) * PANEL_HEIGHT + PAGE_MARGIN // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label={quoteattr(title)} font-family="{FONT}">',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        _text(PAGE_MARGIN, PAGE_MARGIN + 14, title, size=18, weight=600),
        _text(PAGE_MARGIN, PAGE_MARGIN + 36, subtitle, size=12.5, color=FAINT_INK),
        *legend,
    ]
    for number, panel in enumerate(panels):
        x = PAGE_MARGIN + number % columns * PANEL_WIDTH
        y = top + number // columns * PANEL_HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(panels: Sequence[Panel], width: int) -> tuple[list[str], int]:
    """Returns the legend's elements and its height; names that several panels have are listed once."""
    named = {series.name: series for panel in panels for series in panel.series}
    parts: list[str] = []
    x, row = float(PAGE_MARGIN), 0
    for series in named.values():
        needed = 40 + CHARACTER_WIDTH * len(series.name)
        if x + needed > width - PAGE_MARGIN and x > PAGE_MARGIN:
            x, row = float(PAGE_MARGIN), row + 1
        y = PAGE_MARGIN + HEADER_HEIGHT + row * LEGEND_ROW_HEIGHT
        parts += [
            f'<path d="M{x:.1f} {y - 4}h22" {_stroke(series)}/>',
            _marker(x + 11, y - 4, series),
            _text(x + 28, y, series.name, size=12.5),
        ]
        x += needed
    return parts, (row + 1) * LEGEND_ROW_HEIGHT


def _panel(panel: Panel) -> Iterator[str]:
    plot_width, plot_height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM
    points = [point for series in panel.series for point in series.points]
    yield _text(LEFT, 18, panel.title, size=14, weight=600)
    if not points:
        return
    values = sorted({point.x for point in points})
    top = _top_of_axis(max(point.high for point in points))

    def place_x(x: float) -> float:
        low, high = (math.log2(values[0]), math.log2(values[-1])) if panel.logarithmic else (values[0], values[-1])
        at = math.log2(x) if panel.logarithmic else x
        # Markers at both ends keep a distance from the frame.
        return LEFT + 14 + (plot_width - 28) * ((at - low) / (high - low) if high > low else 0.5)

    def place_y(y: float) -> float:
        return TOP + plot_height * (1 - y / top)

    for tick in range(TICKS + 1):
        value = top * tick / TICKS
        y = place_y(value)
        yield f'<path d="M{LEFT} {y:.1f}h{plot_width}" stroke="{INK if tick == 0 else GRID}" stroke-width="1"/>'
        yield _text(LEFT - 8, y + 4, _number(value), size=11.5, color=FAINT_INK, anchor="end")
    for x in _labelled(values, place_x):
        yield _text(place_x(x), TOP + plot_height + 18, f"{x:g}", size=11.5, color=FAINT_INK, anchor="middle")
    yield _text(LEFT + plot_width / 2, PANEL_HEIGHT - 8, panel.x_title, size=12, color=FAINT_INK, anchor="middle")
    yield _text(LEFT - 46, TOP - 12, panel.y_title, size=12, color=FAINT_INK)
    for series in sorted(panel.series, key=lambda each: each.bold):
        placed = [(place_x(point.x), place_y(point.y)) for point in series.points]
        for point, (x, _y) in zip(series.points, placed, strict=True):
            if point.high > point.low:
                yield (
                    f'<path d="M{x:.1f} {place_y(point.low):.1f}V{place_y(point.high):.1f}" stroke="{series.color}" '
                    'stroke-width="1.4" stroke-opacity="0.45"/>'
                )
        yield f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in placed)}" {_stroke(series)}/>'
        for x, y in placed:
            yield _marker(x, y, series)


LABEL_DISTANCE = 26
"""Least distance between two numbers under an axis."""


def _labelled(values: Sequence[float], place_x: Callable[[float], float]) -> list[float]:
    """Returns those of the values that have room for their number."""
    kept: list[float] = []
    for value in values:
        if not kept or place_x(value) - place_x(kept[-1]) >= LABEL_DISTANCE:
            kept.append(value)
    return kept


def _top_of_axis(most: float) -> float:
    """Returns the least round number that is not below the value, and whose parts by TICKS are round too."""
    if most <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(most / TICKS))
    return next(
        TICKS * unit * step
        for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
        if TICKS * unit * step >= most * (1 - 1e-9)
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def _stroke(series: Series) -> str:
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    width = 2.8 if series.bold else 1.8
    return f'fill="none" stroke="{series.color}" stroke-width="{width}" stroke-linejoin="round"{dash}'


def _marker(x: float, y: float, series: Series) -> str:
    radius = 4 if series.bold else 3
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{series.color}" stroke="{PAPER}" stroke-width="1.2"/>'


def _text(
    x: float, y: float, text: str, *, size: float, color: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
