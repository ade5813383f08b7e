"""Tool calls are found in whatever pieces the text comes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.front.tool_calls import HermesParser, ParsedCall

ONE = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TWO = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
LIST = '<tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]</tool_call>'


def parse(text: str, cuts: list[int]) -> tuple[str, list[ParsedCall]]:
    parser, shown, calls = HermesParser(), "", []
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    for start, stop in pairwise(places):
        found = parser.feed(text[start:stop])
        shown += found.text
        calls += found.calls
    found = parser.finish()
    return shown + found.text, [*calls, *found.calls]


@pytest.mark.parametrize(
    ("text", "shown", "names"),
    [
        ("plain text < 5 <tool", "plain text < 5 <tool", []),
        (ONE, "", ["f"]),
        (f"Let me see.\n{ONE}\n{TWO}\n", "Let me see.", ["f", "g"]),
        (LIST, "", ["f", "g"]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", ["f"]),
        ("<tool_call>no JSON</tool_call> and on", "<tool_call>no JSON</tool_call> and on", []),
        ('<tool_call>{"no": "name"}</tool_call>', '<tool_call>{"no": "name"}</tool_call>', []),
        ("<tool_call>{", "<tool_call>{", []),
        (f"{ONE} thanks", "thanks", ["f"]),
    ],
)
@given(cuts=st.lists(st.integers(0, 120), max_size=12))
def test_calls_and_text_do_not_depend_on_the_pieces(text: str, shown: str, names: list[str], cuts: list[int]) -> None:
    got, calls = parse(text, cuts)
    assert [call.name for call in calls] == names
    assert got.strip() == shown
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    assert len({call.id for call in calls}) == len(calls)


@given(text=st.text(alphabet="<>/tool_cal {}\n", max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_nothing_that_is_no_call_is_lost(text: str, cuts: list[int]) -> None:
    got, calls = parse(text, cuts)
    assert not calls
    assert got == text
