"""Regular expressions mean what they mean to JavaScript, over the whole text, in JSON strings too; or are refused."""

from __future__ import annotations

import json
import random
import re

import pytest
from tests.structured.byte_tokens import accepts, of_regex, of_schema, random_text

from outrider.errors import RequestError

EXPRESSIONS = (
    *("a", "a|b|", "(a|b|){2}c", "(?:ab)+", "(?P<name>ab){2,3}", "a{0}b", "a{2}", "a{1,}b", "x{0,}", "a*?b", "a??"),
    *("^ab$", "^a|b$", r"\d{2,3}", r"[\w.-]{1,5}", "[^x ]{1,4}", ".{1,4}", r"[\s\S]{1,3}", r"\x41\u0042\u{43}"),
    *('"{1,2}', r"\\{1,2}", '[\\\\"]{1,3}', r"[\n\t]{1,2}", r"\0", "[ -~]{1,6}", "[A-z]{1,4}", "[!-/]{2}"),
    *(
        r"[\^]",
        r"[\^a]",
        "[a^]",
        r"[\^-`]{2}",
        r"\^",
        r"[\]\[\-]{1,3}",
        "[a-]",
        "[-a]",
        "]",
        "}",
        r"\.\*\+\?\(\)\{\|\$",
    ),
    *("é+", "[à-é]{1,3}", "🙂{1,2}", "日本[語x]?", "[😀-😂]", "( [a-z]{2,3}){1,4}", "((a|b){2}c){0,3}"),
)
REFUSED = (
    *(("(?=a)b", "look-ahead"), ("(?!a)b", "look-ahead"), ("(?<=a)b", "look-ahead"), ("(?i)a", "flag")),
    *((r"\bfoo", r"\b"), (r"(a)\1", r"\1"), (r"\p{L}", r"\p"), (r"\cA", r"\c"), (r"\Aa", r"\A")),
    *(("a^b", "^ after"), ("(^a)", "^ after"), ("a$b", "$ before"), ("(a$)b", "$ before")),
    *(("(a", "parenthesis"), ("a)", "without its ("), ("[a", "not closed"), ("[]", "without characters")),
    *((r"[^\s\S]", "without characters"), ("[z-a]", "ends before"), (r"[a-\d]", "ends in a class")),
    *((r"[!-\d]", "ends in a class"), (r"[ -\w]", "ends in a class"), (r"[!-\S]", "ends in a class")),
    *(("*a", "nothing to repeat"), ("a**", "nothing to repeat"), ("a{2", "nothing to repeat"), ("a{3,2}", "swap")),
    *(("\\", "\\"), (r"\ud83d", "no character"), ("(" * 200 + ")" * 200, "nested more than 64 deep")),
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_text_of_the_form_matches(expression: str) -> None:
    # Python knows no \u{…}.
    meant = re.compile(re.sub(r"\\u\{(\w+)\}", lambda found: chr(int(found[1], 16)), expression))
    for grammar, is_json in ((of_regex(expression), False), (of_schema({"pattern": expression}), True)):
        rng = random.Random(expression)
        ended = 0
        for _ in range(60):
            text = random_text(grammar, rng)
            if text is not None:
                ended += 1
                whole = json.loads(text) if is_json else text
                assert meant.fullmatch(whole), (expression, whole)
        assert ended > 0


@pytest.mark.parametrize(("expression", "words"), REFUSED)
def test_what_cannot_be_kept_to_is_refused_with_its_place(expression: str, words: str) -> None:
    with pytest.raises(RequestError) as refusal:
        of_regex(expression)
    assert words in str(refusal.value)
    assert "at character" in str(refusal.value)


def test_expressions_that_take_others_for_ever_are_quick() -> None:
    grammar = of_regex("(a+)+(b|b)*$")
    assert accepts(grammar, "a" * 200 + "b" * 200)
    assert not accepts(grammar, "a" * 200 + "c")


@pytest.mark.parametrize(
    ("expression", "inside", "outside"),
    [
        (r"[\w-.]", "a_-.", "/,"),
        (r"[\d--/]", "7-/", ".,"),
        (r"[\d-a-f]", "7-af", "bcde"),
        (r"[^\d-a]", "b.", "7-a"),
        (r"[\d-\s]", "7- ", "a"),
    ],
)
def test_a_hyphen_behind_a_class_of_characters_is_one_of_the_characters(
    expression: str, inside: str, outside: str
) -> None:
    # JavaScript reads them so; Python refuses them.
    grammar = of_regex(expression)
    assert all(accepts(grammar, character) for character in inside)
    assert not any(accepts(grammar, character) for character in outside)


def test_a_point_is_no_line_end() -> None:
    assert not accepts(of_regex("a.b"), "a\nb")
    assert accepts(of_regex("a.b"), "aéb")
