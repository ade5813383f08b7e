"""Pictures show the figures that they are drawn from."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tools.bench.pictures import heights_in, texts_in

from outrider.tools.bench.decode_plot import AUTO_COLOR, FIXED_COLORS, PASS_COLORS, PLAIN_COLOR, decode_plot
from outrider.tools.bench.svg import Panel, Point, Series, chart

AUTO = "outrider, some"
RATES = {"outrider": {1: 100.0, 8: 400.0}, AUTO: {1: 200.0, 8: 400.0}, f"{AUTO}, k = 3": {1: 200.0, 8: 100.0}}


def report(*, auto: bool = True, model: str = "a-model", **more: Any) -> dict[str, Any]:
    names = [name for name in RATES if auto or name != AUTO]
    cases = [
        {
            "text": text,
            "batch": batch,
            "contestants": {
                name: {"tokens_per_s_by_round": [0.9 * RATES[name][batch], RATES[name][batch], 2 * RATES[name][batch]]}
                for name in names
            },
            "auto": [{"contestant": AUTO}] if auto else [],
        }
        for batch in (1, 8)
        for text in ("chat", "ordinary")
    ]
    config = {"num_threads": 2, "tokens": 128, "rounds": 3}
    facts = {"model": model, "backend": "cpu", "dtype": "float32"}
    return {"cases": cases, "config": config, "cost_curves": {}} | facts | more


def test_a_picture_has_a_panel_for_each_kind_of_text_and_a_line_for_each_contestant() -> None:
    texts = texts_in(decode_plot(report()))
    assert {"Chat", "Ordinary text", "plain", "some, auto", "some, k = 3", "tokens/s", "1", "8"} <= set(texts)
    assert texts.count("plain") == 1
    assert not [text for text in texts if "pass" in text]


def test_equal_figures_are_drawn_at_equal_heights() -> None:
    picture = decode_plot(report())
    plain, auto = heights_in(picture, PLAIN_COLOR)[1:], heights_in(picture, AUTO_COLOR)[1:]
    fixed = heights_in(picture, FIXED_COLORS[0])[1:]
    # Heights grow downwards; there are two panels with two points each.
    assert plain[:2] == plain[2:]
    assert plain[1] == auto[1] < auto[0] == fixed[0] < plain[0] == fixed[1]
    # 100 to 200 is half as far as 200 to 400.
    assert plain[0] - auto[0] == pytest.approx((auto[0] - auto[1]) / 2, abs=0.2)


def test_the_curves_that_the_engine_has_learnt_are_a_panel_of_their_own() -> None:
    curves = {"target": [[1, 0.005], [8, 0.010]], "draft": [[1, 0.001], [8, 0.002]]}
    picture = decode_plot(report(cost_curves={AUTO: curves | {"feed": []}, "another": {"target": [[64, 1.0]]}}))
    assert "feed pass" not in texts_in(picture)
    assert {"What a pass costs, as learnt", "target pass", "draft pass", "ms", "10"} <= set(texts_in(picture))
    target = heights_in(picture, PASS_COLORS["target"])[1:]
    draft = heights_in(picture, PASS_COLORS["draft"])[1:]
    assert target[1] < target[0] < draft[1] < draft[0]


def test_a_picture_without_auto_has_the_fixed_numbers() -> None:
    texts = texts_in(decode_plot(report(auto=False)))
    assert "some, k = 3" in texts
    assert not [text for text in texts if "auto" in text]


def test_names_with_special_characters_stay_well_formed() -> None:
    assert 'Decoding speed of <a "model"> & more' in texts_in(decode_plot(report(model='<a "model"> & more')))


@pytest.mark.parametrize(
    ("most", "top"),
    [(0.0, "1"), (0.9, "1"), (1.0, "1"), (1.01, "1.25"), (9.0, "10"), (730.0, "750"), (12_000.0, "12,500")],
)
def test_axes_end_at_a_round_number_that_is_not_below_the_figures(most: float, top: str) -> None:
    point = Point(x=1, y=most, low=most, high=most)
    panel = Panel(title="t", x_title="x", y_title="y", series=(Series(name="s", color="#000000", points=(point,)),))
    assert top in texts_in(chart("title", "subtitle", [panel]))


def test_numbers_under_an_axis_keep_a_distance() -> None:
    points = tuple(Point(x=x, y=1, low=1, high=1) for x in range(1, 101))
    panel = Panel(
        title="t",
        x_title="x",
        y_title="y",
        series=(Series(name="s", color="#000000", points=points),),
        logarithmic=False,
    )
    shown = [text for text in texts_in(chart("title", "subtitle", [panel])) if text.isdecimal()]
    assert "1" in shown
    assert len(shown) < 30
