"""Which compiled grammars are kept: those wanted last, within limits, and none that failed."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from tests.matching.listed import tiny_table

from outrider.errors import RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.matching import grammars as grammars_module
from outrider.matching.grammars import Grammars
from outrider.matching.messages import Compile
from outrider.matching.process import CompilerProcess
from outrider.matching.tokens import TokenTable

CPU = torch.device("cpu")


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


def compile_all(grammars: Grammars, texts: str) -> None:
    for text in texts:
        grammars.compile(regex(text)).result()
        # Whoever is told of a result may be told before it is entered.
        grammars._worker.submit(lambda: None).result()


def test_a_grammar_that_is_wanted_again_outlives_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "KEPT_MAX", 2)
    grammars = Grammars(tiny_table(), device=CPU, limit_s=300)
    compile_all(grammars, "abac")
    assert [grammar.text for grammar in grammars._kept] == ["a", "c"]


def test_large_grammars_are_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(tiny_table(), device=CPU, limit_s=300)
    size = grammars.compile(regex("a")).result().memory_size_bytes
    monkeypatch.setattr(grammars_module, "KEPT_BYTES_MAX", 2 * size)
    compile_all(grammars, "abcd")
    assert [grammar.text for grammar in grammars._kept] == ["c", "d"]


def test_a_grammar_that_was_given_up_does_not_keep_others_from_being_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "KEPT_MAX", 2)
    grammars = Grammars(tiny_table(), device=CPU, limit_s=300)
    given_up: Future[object] = Future()
    given_up.cancel()
    # Cancelled, but whoever takes it out has not had a turn yet.
    grammars._kept[regex("x")] = given_up
    compile_all(grammars, "abc")
    assert [grammar.text for grammar in grammars._kept] == ["x", "c"]


class FailingOnce(CompilerProcess):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def compile(self, table: TokenTable, order: Compile, limit_s: float) -> str:
        self.asked += 1
        if self.asked == 1:
            raise RequestError("the machine was busy")
        return super().compile(table, order, limit_s)


def test_a_grammar_that_failed_is_tried_again() -> None:
    compiler = FailingOnce()
    grammars = Grammars(tiny_table(), device=CPU, limit_s=300, compiler=compiler)
    with pytest.raises(RequestError, match="busy"):
        compile_all(grammars, "a")
    grammars._worker.submit(lambda: None).result()
    assert not grammars._kept
    compile_all(grammars, "aa")
    assert compiler.asked == 2
