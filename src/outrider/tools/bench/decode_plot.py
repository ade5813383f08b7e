"""The picture of `outrider bench decode`: tokens per second over the batch size, and what a step costs.

One panel for each kind of text has plain decoding, fixed numbers of drafts, and "auto", with which the engine chooses
the number itself. They are those of one drafter: the first that was measured with "auto", or else the first at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

from outrider.tools.bench.svg import Panel, Point, Series, chart

PLAIN_COLOR, AUTO_COLOR = "#52606d", "#d9480f"
PASS_COLORS = {"target": "#6741d9", "draft": "#0b7285", "feed": "#5c940d"}
FIXED_COLORS = ("#8ec5e8", "#4c9fd6", "#1f6fb2", "#0b3f73")
Curves = Mapping[str, Sequence[Sequence[float]]]
"""For each kind of pass, the seconds that one of so many rows takes, as [rows, seconds]."""


def decode_plot(report: Mapping[str, Any]) -> str:
    """Returns the picture of a report as SVG; with cost curves, it has a panel of what the engine has learnt."""
    kinds = dict.fromkeys(case["text"] for case in report["cases"])
    panels = [_speed_panel(kind, [case for case in report["cases"] if case["text"] == kind]) for kind in kinds]
    curves = _learnt(report)
    if curves is not None:
        panels.append(_cost_panel(curves))
    config = report["config"]
    threads = config["num_threads"]
    return chart(
        f"Decoding speed of {report['model']}",
        f"{report['backend']}, {report['dtype']}, {threads} thread{'s' * (threads > 1)}; {config['tokens']} tokens a "
        f"request, greedy; medians of {config['rounds']} rounds, bars: their middle half",
        panels,
    )


def _learnt(report: Mapping[str, Any]) -> Curves | None:
    """Returns the curves of the contestant that is drawn as "auto", without passes that were never observed."""
    for case in report["cases"]:
        for choice in case["auto"][:1]:
            found = report["cost_curves"].get(choice["contestant"])
            return {name: points for name, points in found.items() if points} if found else None
    return None


def _speed_panel(kind: str, cases: Sequence[Mapping[str, Any]]) -> Panel:
    return Panel(
        title=f"{kind.capitalize()} text" if kind in ("ordinary", "repetitive") else kind.capitalize(),
        x_title="requests in the batch",
        y_title="tokens/s",
        series=tuple(
            Series(
                name=label,
                color=color,
                points=tuple(
                    _speed_point(case["batch"], case["contestants"][name]["tokens_per_s_by_round"])
                    for case in cases
                    if name in case["contestants"]
                ),
                bold=color == AUTO_COLOR,
                dashed=color == PLAIN_COLOR,
            )
            for name, label, color in _drawn(cases[0])
        ),
    )


def _drawn(case: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns (contestant, name in the legend, colour) of those that are drawn."""
    names = list(case["contestants"])
    plain, ours = names[0], [name for name in names[1:] if name.startswith(f"{names[0]}, ")]
    chosen = case["auto"][0]["contestant"] if case["auto"] else None
    drafter = chosen or (ours[0].partition(", k = ")[0] if ours else None)
    fixed = [name for name in ours if drafter is not None and name.startswith(f"{drafter}, k = ")]
    drawn = [(plain, "plain", PLAIN_COLOR)]
    for place, name in enumerate(fixed):
        label = name.removeprefix(f"{plain}, ")
        drawn.append((name, label, FIXED_COLORS[place % len(FIXED_COLORS)]))
    if chosen is not None:
        drawn.append((chosen, f"{chosen.removeprefix(f'{plain}, ')}, auto", AUTO_COLOR))
    return drawn


def _speed_point(batch: int, rates: Sequence[float]) -> Point:
    if len(rates) < 2:
        return Point(x=batch, y=rates[0], low=rates[0], high=rates[0])
    low, middle, high = quantiles(rates, n=4, method="inclusive")
    return Point(x=batch, y=middle, low=low, high=high)


def _cost_panel(curves: Curves) -> Panel:
    return Panel(
        title="What a pass costs, as learnt",
        x_title="rows in the pass",
        y_title="ms",
        logarithmic=False,
        series=tuple(
            Series(
                name=f"{name} pass",
                color=PASS_COLORS.get(name, PLAIN_COLOR),
                points=tuple(_cost_point(rows, seconds) for rows, seconds in points if rows > 0),
            )
            for name, points in curves.items()
        ),
    )


def _cost_point(rows: float, seconds: float) -> Point:
    return Point(x=rows, y=1000 * seconds, low=1000 * seconds, high=1000 * seconds)
