"""The rules of wording that a machine can keep: whole sentences with a named subject, and the field's vocabulary."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "outrider"

# A docstring that begins like this is the second half of a sentence whose first half is the name above it.
FRAGMENT = re.compile(
    r"(Of|The same|Those|These|In it|It|Its|They|Them|As|Also|And|But|Or|Until|Whoever|Who|Where there|So many|None:)"
    r"(?!\w)"
)
# Words that say nothing without a noun or a verb beside them.
EMPTY_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a all also an and are as at both by each for from here in is it its like many more most none not of on one "
        "only or other others same so some such than that the their them there these they this those to what where "
        "which with",
    )
)
# Requests, threads, rows and pages are things, and have names.
PERSONS = re.compile(
    r"\b(nobody|somebody|everybody|anybody|whoever|whomever|someone|everyone|anyone)\b|\bin vain\b|\bfor company\b",
    re.I,
)
# Identifiers that the field has another word for, and that word.
PRIVATE_NAMES = {
    "Greatest": "Argmax",
    "StepRow": "ScheduledRequest",
    "SINK": "NULL_PAGE",
    "together": "joint_probability",
    "share": "probability, row_quota, shared",
    "shares": "probabilities",
    "share_rows": "row_quota",
    "weighs": "probabilities",
    "PageTable": "BlockTable",
    "PageTables": "BlockTables",
    "page_table": "block_table",
    "page_tables": "block_tables",
}
# Prose has one word for a thing, too.
PRIVATE_PHRASES = {"page table": "block table"}
# Here a line is never one of a text, but would be a row of a block table. Kernels have cache lines.
LINELESS = ("backends", "engine", "kv", "runner", "scheduler", "speculative")
KERNELS = SOURCES / "backends" / "cpu" / "kernels"
# Prose that the benchmarks have models continue.
TEXTS = SOURCES / "tools" / "bench" / "texts.py"


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Bare string statements: docstrings, and notes in their manner under attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def fragments(source: str) -> list[str]:
    """Docstrings that are not understood without the name above them."""
    found = []
    for line, text in strings(source):
        # A shape such as "int64 [rows]" says what a tensor holds.
        words = [word for word in re.findall(r"[A-Za-z]{3,}", text) if word.lower() not in EMPTY_WORDS]
        if re.search(r'"\n\s*"', text):
            found.append(
                f"{line}: a quotation mark at the end of a line, left over from joining strings: {text[:60]!r}"
            )
        if FRAGMENT.match(text) or not (words or "[" in text or "(" in text):
            found.append(f"{line}: begin with the subject: {text[:60]!r}")
    return found


def persons(source: str) -> list[str]:
    lines = enumerate(source.splitlines(), start=1)
    return [f"{number}: name the thing: {line.strip()[:80]}" for number, line in lines if PERSONS.search(line)]


def names(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def private_names(source: str) -> list[str]:
    return [
        f"{line}: {name} is called {PRIVATE_NAMES[name]} in this field"
        for line, name in names(source)
        if name in PRIVATE_NAMES
    ]


def private_phrases(text: str) -> list[str]:
    return [
        f"{number}: a {phrase} is called {word} here"
        for number, line in enumerate(text.lower().splitlines(), start=1)
        for phrase, word in PRIVATE_PHRASES.items()
        if phrase in line
    ]


RULES = (fragments, persons, private_names, private_phrases)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps(rule) -> None:  # type: ignore[no-untyped-def]
    problems = [
        f"{path.relative_to(ROOT)}:{problem}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path != TEXTS
        for problem in rule(path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda path: path.name)
def test_documents_keep_to_one_word_for_a_thing(path: Path) -> None:
    assert not private_phrases(path.read_text(encoding="utf-8"))


def test_rows_of_block_tables_are_not_called_lines() -> None:
    problems = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in LINELESS
        for path in sorted((SOURCES / package).rglob("*.py"))
        if KERNELS not in path.parents
        for line, name in names(path.read_text(encoding="utf-8"))
        if re.fullmatch(r"_?lines?|(line_\w+|\w+_lines?)", name) and name not in ("splitlines", "readline")
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (fragments, 'class A:\n    """Of rows."""'),
        (fragments, 'def f():\n    """The same, here."""'),
        (fragments, 'def f():\n    """Those that it ended."""'),
        (fragments, 'x: int\n"""All of it."""'),
        (fragments, 'x: int\n"""None: it is done."""'),
        (fragments, 'x = 1\n"""Number of rows, "\n"and columns."""'),
        (persons, "# nobody reads it"),
        (persons, "raise ValueError('somebody else holds it')"),
        (private_names, "row.share = 1"),
        (private_names, "class Greatest: pass"),
        (private_phrases, "# Page tables are arrays."),
    ],
)
def test_rule_reports(rule, source: str) -> None:  # type: ignore[no-untyped-def]
    assert rule(source)


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (fragments, 'class A:\n    """Number of rows in the matrix."""'),
        (fragments, 'x: Tensor\n"""int64 [rows]"""'),
        (fragments, 'def f():\n    """Returns the pages that both requests hold."""'),
        (persons, "# no request reads it"),
        (private_names, "shared = pages\nprobability = 0.5"),
    ],
)
def test_rule_accepts(rule, source: str) -> None:  # type: ignore[no-untyped-def]
    assert rule(source) == []
