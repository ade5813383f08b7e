"""Grammars are compiled off the step loop, once each, within limits; special tokens are in none."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.tiny import tiny_engine
from tests.matching.listed import ending_model, tiny_table
from tests.server.running import wait_until
from tests.server.tiny_model import real_text

from outrider.api.async_llm import AsyncLLM
from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.errors import NotNowError, RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.matching import grammars as grammars_module
from outrider.matching import process as process_module
from outrider.matching.grammars import Grammars
from outrider.matching.messages import Compile
from outrider.matching.process import CompilerProcess
from outrider.matching.tokens import TokenTable, token_table
from outrider.sampling import SamplingParams

CPU = torch.device("cpu")


class HeldCompiler(CompilerProcess):
    """Compiles only what it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self.asked: list[str] = []

    def compile(self, table: TokenTable, order: Compile, limit_s: float) -> str:
        self.asked.append(order.grammar.text)
        assert self.let.wait(300), "nobody let it"
        return super().compile(table, order, limit_s)


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (GrammarKind.REGEX, "(ab", "parenthesis that is not closed"),
        (GrammarKind.EBNF, "start ::= x", "root"),
        (GrammarKind.JSON_SCHEMA, '{"type":"objct"}', "objct"),
        (GrammarKind.JSON_SCHEMA, '{"$ref":"#/$defs/x"}', "$defs"),
        (GrammarKind.JSON_SCHEMA, '{"properties":{"a":{"not":{}}}}', "properties 'a': not cannot be kept to"),
        (GrammarKind.JSON_SCHEMA, '{"items":{"uniqueItems":true}}', "items: uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"allOf":[{"type":"string"},{"maxLength":3}]}', "write them as one"),
        (GrammarKind.JSON_SCHEMA, '{"properties":{"a":7}}', "a schema is an object"),
        (GrammarKind.CHOICE, "[]", "at least one"),
        (GrammarKind.EBNF, 'root ::= root "b"', "no text has the form"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_reason(kind: GrammarKind, text: str, words: str) -> None:
    llm = LLM.over(tiny_engine(ending_model()))
    with pytest.raises(RequestError) as refusal:
        llm.generate([1, 2], SamplingParams(grammar=Grammar(kind=kind, text=text)))
    assert words in str(refusal.value)
    assert ".cc:" not in str(refusal.value)
    assert not llm.engine.has_work


def test_a_grammar_and_a_text_without_end_contradict_each_other() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        LLM.over(tiny_engine(ending_model())).generate([1], SamplingParams(grammar=regex("a"), ignore_eos=True))


def test_what_takes_too_long_is_refused_and_the_next_is_served() -> None:
    process = CompilerProcess()
    process.start(tiny_table())
    stopped = process.pid
    assert stopped is not None
    # A process that is stopped takes longer than any limit.
    os.kill(stopped, signal.SIGSTOP)
    order = Compile(grammar=regex("a"))
    with pytest.raises(RequestError, match=r"the regex took longer than 0\.5 s to compile; make it simpler"):
        process.compile(tiny_table(), order, 0.5)
    assert not Path(f"/proc/{stopped}").exists()
    assert process.compile(tiny_table(), order, 300)
    assert process.pid not in (None, stopped)


def test_a_process_that_takes_nothing_in_does_not_hold_up_a_long_grammar() -> None:
    process = CompilerProcess()
    process.start(tiny_table())
    stopped = process.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    # More than a pipe holds.
    order = Compile(grammar=regex("a" * (1 << 20)))
    with ThreadPoolExecutor() as thread:
        compiled = thread.submit(process.compile, tiny_table(), order, 0.5)
        try:
            error = compiled.exception(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGKILL)
    assert isinstance(error, RequestError)
    assert "took longer than 0.5 s" in str(error)


def test_a_compiler_that_does_not_start_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    process, order = CompilerProcess(), Compile(grammar=regex("a"))
    with monkeypatch.context() as broken:
        broken.setattr(process_module, "MODULE", "outrider.no_such_module")
        with pytest.raises(NotNowError, match="does not start"):
            process.compile(tiny_table(), order, 300)
    assert process.compile(tiny_table(), order, 300)


def test_the_process_ends_with_whoever_started_it() -> None:
    program = (
        "from outrider.matching.process import CompilerProcess\n"
        "from outrider.matching.tokens import TokenTable\n"
        "process = CompilerProcess()\n"
        "process.start(TokenTable(spelling=[b'a', b''], eos_ids=(1,)))\n"
        "print(process.pid, flush=True)\n"
        "input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        status = Path(f"/proc/{(compiler := int(starter.stdout.readline()))}/status")
        # As in native code: it does not look at its input.
        os.kill(compiler, signal.SIGSTOP)
        starter.kill()
    wait_until(lambda: not status.exists() or "State:\tZ" in status.read_text())


def test_the_process_outlives_the_thread_that_wanted_it() -> None:
    process = CompilerProcess()
    first = threading.Thread(target=process.start, args=(tiny_table(),))
    first.start()
    first.join()
    started = process.pid
    assert process.compile(tiny_table(), Compile(grammar=regex("a")), 300)
    assert process.pid == started


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_grammar_is_refused_when_a_second_compiler_dies_of_it(deaths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may have died of something else."""
    process, order, died = CompilerProcess(), Compile(grammar=regex("a")), []
    process.start(tiny_table())
    ask = process._ask

    def ask_the_dead(asked: Any, limit_s: float) -> Any:
        if asked is order and len(died) < deaths:
            assert process._process is not None
            died.append(process.pid)
            process._process.kill()
            process._process.wait()
        return ask(asked, limit_s)

    monkeypatch.setattr(process, "_ask", ask_the_dead)
    if deaths == 2:
        with pytest.raises(RequestError, match="took too much memory to compile"):
            process.compile(tiny_table(), order, 300)
    assert process.compile(tiny_table(), order, 300)
    assert len(set(died)) == deaths


def test_a_grammar_is_compiled_once_and_forgotten_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "KEPT_MAX", 2)
    grammars = Grammars(tiny_table(), device=CPU, limit_s=60)
    first = grammars.compile(regex("a"))
    first.result()
    assert grammars.compile(regex("a")) is first
    for text in ("b", "c", "d"):
        grammars.compile(regex(text)).result()
    # Whoever is told of a result may be told before it is entered.
    grammars._worker.shutdown(wait=True)
    assert [grammar.text for grammar in grammars._kept] == ["c", "d"]


async def text_of(llm: AsyncLLM, params: SamplingParams) -> str:
    text = ""
    async for output in llm.generate({"prompt_token_ids": [1, 2, 3]}, params):
        text = output.outputs[0].text
    return text


def held_engine() -> tuple[Engine, HeldCompiler]:
    engine, compiler = tiny_engine(ending_model()), HeldCompiler()
    engine.grammars = Grammars(tiny_table(), device=CPU, limit_s=300, compiler=compiler)
    return engine, compiler


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    engine, compiler = held_engine()

    async def both() -> str:
        async with AsyncLLM(llm=LLM.over(engine)) as llm:
            waiting = asyncio.create_task(text_of(llm, SamplingParams(temperature=0, grammar=regex("abc"))))
            while not compiler.asked:
                await asyncio.sleep(0.01)
            assert await text_of(llm, SamplingParams(temperature=0, max_tokens=4))
            assert not waiting.done()
            compiler.let.set()
            return await waiting

    assert asyncio.run(both()) == "abc"


def test_a_caller_who_leaves_does_not_take_the_grammar_from_others() -> None:
    engine, compiler = held_engine()

    async def three() -> list[str]:
        async with AsyncLLM(llm=LLM.over(engine)) as llm:
            params = SamplingParams(temperature=0, grammar=regex("abc"))
            callers = [asyncio.create_task(text_of(llm, params)) for _ in range(3)]
            while not compiler.asked:
                await asyncio.sleep(0.01)
            callers[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await callers[0]
            compiler.let.set()
            return await asyncio.gather(*callers[1:])

    assert asyncio.run(three()) == ["abc", "abc"]
    assert compiler.asked == ["abc"]


def test_too_many_that_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "WAITING_MAX", 2)
    compiler = HeldCompiler()
    grammars = Grammars(tiny_table(), device=CPU, limit_s=300, compiler=compiler)
    waiting = [grammars.compile(regex(text)) for text in ("a", "b")]
    with pytest.raises(NotNowError, match="2 other grammars wait"):
        grammars.compile(regex("c"))
    assert grammars.compile(regex("b")) is waiting[1]
    compiler.let.set()
    assert all(future.result() is not None for future in waiting)
    grammars.compile(regex("c")).result()


def test_no_grammar_allows_a_special_token() -> None:
    """Not even where the text of one would fit."""
    tokenizer = real_text().tokenizer
    size = tokenizer.vocab_size + 5  # padded, as models are
    table = token_table(tokenizer, vocab_size=size, eos_ids=[2])
    assert tokenizer.special_ids
    grammars = Grammars(table, device=CPU, limit_s=60)
    matcher = grammars.matcher(grammars.compile(regex("[^\\n]*")).result())
    (mask,) = matcher.masks([])
    assert mask is not None
    allowed = set(mask.nonzero()[:, 0].tolist())
    assert allowed & set(tokenizer.special_ids) == {2}
    assert not allowed & set(range(tokenizer.vocab_size, size))
    text = "a <b> é 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert matcher.count_allowed(ids) == len(ids)
    assert b"".join(table.spelling[token] for token in ids).decode() == text


def test_pieces_are_spelt_with_spaces_and_raw_bytes() -> None:
    import tokenizers
    from tokenizers import decoders, models

    from outrider.models.tokenizer import Tokenizer

    backend = tokenizers.Tokenizer(
        models.BPE({"▁a": 0, "b▁": 1, "<0xC3>": 2, "<0xA9>": 3, "</s>": 4}, [], byte_fallback=True)
    )
    backend.add_special_tokens(["</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    table = token_table(Tokenizer(backend, source="test", eos_ids=[4]), vocab_size=6, eos_ids=[4])
    assert table.spelling == [b" a", b"b ", b"\xc3", b"\xa9", b"", b""]
    grammars = Grammars(table, device=CPU, limit_s=60)
    matcher = grammars.matcher(grammars.compile(regex(" aé?")).result())
    assert matcher.count_allowed([0, 2, 3, 4]) == 4
    assert matcher.count_allowed([0, 3]) == 1
