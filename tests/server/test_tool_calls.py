"""Tool calls are found in whatever pieces the text comes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.front.tool_calls import ForcedParser, HermesParser, ParsedCall, ToolParser, with_piece

ONE = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TWO = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
HALF_NAME = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
HALF_TEXT = '<tool_call>{"arguments": {"x": "\\ud800"}, "name": "f"}</tool_call>'
LONG_NUMBER = f'<tool_call>{{"arguments": {{"x": {"1" * 5000}}}, "name": "f"}}</tool_call>'
LIST = '<tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]</tool_call>'


def parse(text: str, cuts: list[int], parser: ToolParser | None = None) -> tuple[str, list[ParsedCall]]:
    parser = parser or HermesParser()
    shown, calls = "", list[ParsedCall]()
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    for found in (*(parser.feed(text[start:stop]) for start, stop in pairwise(places)), parser.finish()):
        shown += found.text
        for piece in found.calls:
            calls = with_piece(calls, piece)
    return shown, calls


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
        # What JSON may say and no answer can: half a surrogate pair, a number without end.
        (HALF_NAME, HALF_NAME, []),
        (HALF_TEXT, HALF_TEXT, []),
        (LONG_NUMBER, LONG_NUMBER, []),
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


ESCAPED = '{"name": "f", "arguments": {"text": "a } \\"{ ]", "deep": [{"x": {}}]}}'


@given(cuts=st.lists(st.integers(0, 120), max_size=12))
def test_braces_in_texts_do_not_end_arguments(cuts: list[int]) -> None:
    _, (first, second) = parse(f"<tool_call>[{ESCAPED}, {ESCAPED}]</tool_call>", cuts)
    assert first.arguments == second.arguments == json.dumps(json.loads(ESCAPED)["arguments"])


def test_a_call_begins_with_its_name_and_arguments_follow_as_they_are_written() -> None:
    parser = HermesParser()
    told = [
        parser.feed(text).calls
        for text in ('<tool_call>{"na', 'me": "f", "arguments": ', '{"x"', ": 12", "3}}</tool", "_call>")
    ]
    assert [[(piece.name, piece.arguments) for piece in pieces] for pieces in told] == [
        [],
        [],
        [("f", ""), (None, '{"x"')],
        [(None, ": 12")],
        [(None, "3}")],
        [],
    ]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        # Cut off by max_tokens, or no JSON at all: clients have to look, as everywhere.
        ('<tool_call>{"name": "f", "arguments": {"x": "half a', '{"x": "half a'),
        ('<tool_call>{"name": "f", "arguments": {x: 1}}</tool_call>', "{x: 1}"),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', '{"x": 1}'),
        ('<tool_call>{"name": "f", "arguments": "free text"}</tool_call>', "free text"),
    ],
)
def test_arguments_are_passed_on_as_they_are(text: str, arguments: str) -> None:
    for cuts in ([], [20, 45], list(range(len(text)))):
        shown, calls = parse(text, cuts)
        assert (shown, [(call.name, call.arguments) for call in calls]) == ("", [("f", arguments)])


@given(cuts=st.lists(st.integers(0, 120), max_size=12))
def test_forced_calls_come_in_pieces_too(cuts: list[int]) -> None:
    shown, calls = parse('{"x": 1}', cuts, ForcedParser("f"))
    assert (shown, [(call.name, call.arguments) for call in calls]) == ("", [("f", '{"x": 1}')])
    text = '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'
    shown, calls = parse(text, cuts, ForcedParser(None))
    assert (shown, [(call.name, call.arguments) for call in calls]) == ("", [("f", '{"x": 1}'), ("g", "{}")])


def test_white_space_without_end_takes_no_time() -> None:
    """Each piece is looked at once, not once for every way to divide it."""
    blank = " \n" * 20_000
    shown, calls = parse(f"<tool_call>{blank}</tool_call>", [])
    assert (shown, calls) == (f"<tool_call>{blank}</tool_call>", [])


@given(text=st.text(alphabet="<>/tool_cal {}\n", max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_nothing_that_is_no_call_is_lost(text: str, cuts: list[int]) -> None:
    got, calls = parse(text, cuts)
    assert not calls
    assert got == text
