"""What windows save and cost: the layouts are what they say, memory stays near the least possible. Never the time."""

import pytest

from outrider.kv.archetypes import ARCHETYPES
from outrider.kv.footprint import NO_DRAFTER
from outrider.tools.bench.kv_windows import (
    WindowReport,
    arithmetic_minimum,
    measure_held,
    measure_windows,
    window_cases,
)

METHODS = [name for name, archetype in ARCHETYPES.items() if archetype.owns_kv]


@pytest.fixture(scope="module")
def report() -> WindowReport:
    return measure_windows(METHODS[1], 3, prompt_tokens=2048, rounds=1, context=1024, decoded=256)


def test_five_layers_with_a_window_share_an_arena_with_one_without() -> None:
    layout = window_cases(METHODS[0])["5:1, dense"].layout
    assert sorted((spec.kind.label, spec.page_tokens) for spec in layout.target) == [("full", 80), ("sliding:512", 16)]
    assert len(layout.arena_page_bytes) == 1
    assert layout.alignment == 80


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("name", ["5:1, dense, drafter", "5:1, tail, drafter"])
def test_a_text_of_8k_holds_little_more_than_the_least_possible(method: str, k: int, name: str) -> None:
    case = window_cases(method)[name]
    held = measure_held(case, name, k, context=8192, decoded=600)
    assert held.least_possible_bytes <= held.most_bytes
    assert held.ratio <= 1.15
    # Full layers hold everything, the others a window and a page: nothing else is left out of the account.
    by_hand = sum(
        spec.slot_bytes * (512 + spec.page_tokens if spec.kind.slides else 8192) for spec in case.layout.target
    )
    assert arithmetic_minimum(case.layout, 8192) == by_hand
    assert held.plain_bytes > 4 * held.most_bytes


def test_every_case_is_compared_with_a_plain_one_of_the_same_run(report: WindowReport) -> None:
    data = report.to_json()
    plain = {row["case"] for row in data["long_prompt"] if row["against"] is None}
    assert plain == {"plain", "plain, drafter"}
    assert {row["against"] for row in data["long_prompt"] if row["against"]} == plain
    assert all(row["total_ms_ratio"] == 1 for row in data["long_prompt"] if row["case"] in plain)
    assert data["ratio_max"] == max(row["total_ms_ratio"] for row in data["long_prompt"])
    assert {(row["layout"], row["k"]) for row in data["held"]} >= {("5:1, dense", 0), ("5:1, tail, drafter", 3)}


def test_drafters_have_a_window_of_their_own_beside_large_and_small_pages() -> None:
    for method in METHODS:
        case = window_cases(method)["256 and 64 a page, drafter with a window"]
        assert case.layout.footprint is not NO_DRAFTER
        assert [spec.kind.label for spec in case.layout.groups] == ["full", "sliding:128", "sliding:128"]
        assert case.layout.alignment == 256
