"""`outrider chat` as a person or a script calls it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.cli.cli import Outrider, chat_model
from tests.engine.tiny import first_layers, tiny_engine

from outrider.api.llm import LLM
from outrider.cli.chat_session import ChatSession
from outrider.cli.chat_view import AnswerView
from outrider.cli.terminal import Interruption, interruptible
from outrider.engine.outputs import CompletionOutput, Origin
from outrider.sampling import SamplingParams
from outrider.speculative.drafters.draft_model import draft_model_from
from outrider.speculative.settings import DrafterSettings
from outrider.tools.bench.speedup import StepTimes, plain_engine, plain_step_times


def session(**settings: object) -> ChatSession:
    engine = tiny_engine(chat_model(), speculate=True, **settings)
    return ChatSession(LLM.over(engine), SamplingParams(temperature=0, max_tokens=20))


def test_a_piped_conversation_is_answered_line_by_line(tiny: Outrider) -> None:
    run = tiny("chat", "--max-tokens", 8, stdin="hello\n\n/stats\nhello again\n/exit\nnever read\n")
    assert run.status == 0, run.err
    assert "\x1b" not in run.out + run.err
    figures = re.findall(r"(\d+) tokens in .* (\d+) of (\d+) prompt tokens cached", run.err)
    assert [tokens for tokens, _, _ in figures] == ["8", "8"]
    (_, _, first_prompt), (_, cached, second_prompt) = figures
    assert int(second_prompt) > int(first_prompt)
    assert int(cached) >= int(first_prompt), "the second turn takes the first from the prefix cache"
    assert "answers          2" in run.err


def test_reset_forgets_and_unknown_commands_are_explained(tiny: Outrider) -> None:
    run = tiny("chat", "--max-tokens", 4, stdin="hello\n/reset\nhello\n/what\n")
    first, second = re.findall(r"of (\d+) prompt tokens cached", run.err)
    assert first == second
    assert "unknown command /what" in run.err
    assert "/help" in run.err


def test_once_answers_and_compares_with_plain_steps(tiny: Outrider) -> None:
    run = tiny("chat", "--once", "abcabcabcabc", "--max-tokens", 16, "--show-drafts")
    assert run.status == 0, run.err
    marks = re.search(r"token by token: ([.+x*]+)$", run.out, re.MULTILINE)
    assert marks is not None
    assert len(marks[1]) == 16
    assert re.search(r"\d\.\d× as fast as steps without drafts \(\d+\.\d ms\)", run.err)


def test_without_speculation_there_is_nothing_to_compare(tiny: Outrider) -> None:
    run = tiny("chat", "--once", "abcabcabc", "--max-tokens", 8, "--no-speculation")
    assert run.status == 0
    assert "steps without drafts" not in run.err
    assert "acceptance" not in run.err


def test_a_conversation_that_outgrows_the_context_says_so(tiny: Outrider) -> None:
    run = tiny("chat", "--max-model-len", 64, "--max-tokens", 4, stdin="hello\n" + "x" * 80 + "\n")
    assert run.status == 1
    assert "/reset forgets the conversation" in run.err


def test_an_answer_that_is_stopped_stays_in_the_conversation() -> None:
    chat = session()
    growing = chat.answer("hello")
    turn = next(growing)
    turn = next(growing)
    growing.close()
    assert turn.output.outputs[0].finish_reason == "abort"
    assert chat.messages[-1] == {"role": "assistant", "content": turn.output.outputs[0].text}
    assert not chat.llm.engine.has_work
    assert sum(1 for _ in chat.answer("and now?")) > 0


def test_the_probe_leaves_nothing_in_the_conversation() -> None:
    chat = session()
    for _turn in chat.answer("hello hello hello", probe_before=True):
        pass
    (turn,) = chat.turns
    assert turn.output.metrics.cached_tokens == 0, "the probe before has a cache of its own"
    counts = chat.llm.engine.speculation.drafts
    chat.measure_plain_steps(turn, limit_s=1.0)
    assert len(turn.plain_steps_s) >= 8
    assert chat.llm.engine.speculation.drafts == counts, "plain steps verify nothing"


def test_a_drafter_with_kv_is_compared_with_an_engine_without_it() -> None:
    model = chat_model()
    probe = tiny_engine(model)
    assert plain_engine(probe) is probe
    settings = DrafterSettings(
        target=model,
        backend=probe.runner.backend,
        page_tokens=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=256,
    )
    engine = tiny_engine(model, drafter=draft_model_from(first_layers(model, 1), settings))
    plain = plain_engine(engine)
    assert plain is not engine
    assert not plain.scheduler.kv.layout.footprint.groups
    assert len(plain_step_times(plain, [1, 2, 3], steps=5)) == 5


def test_speed_up_weighs_each_kind_of_step_by_its_median() -> None:
    times = StepTimes()
    for seconds in (1.0, 1.0, 100.0):
        times.add(drafts=0, tokens=1, seconds=seconds)
    times.add(drafts=4, tokens=5, seconds=2.0)
    assert times.typical_s == 3 * 1.0 + 2.0
    assert times.speed_up(1.0) == 8 / 5
    assert StepTimes().speed_up(1.0) is None


def test_text_is_shown_once_and_stop_strings_are_held_back() -> None:
    view = AnswerView(show_drafts=True)
    answer = CompletionOutput(index=0)
    shown: list[tuple[str, Origin]] = []
    growth = [("He", "Hell", Origin.PLAIN), ("Hello wo", "o wo", Origin.ACCEPTED), ("Hello world", "rld", Origin.BONUS)]
    for text, piece, origin in growth:
        answer.pieces.append(piece)
        answer.origins.append(origin)
        answer.token_ids.append(0)
        answer.text = text
        shown += view.new_text(answer)
    answer.text += "!"  # what the detokenizer had kept back
    shown += view.new_text(answer)
    assert "".join(text for text, _ in shown) == "Hello world!"
    assert shown[0] == ("He", Origin.PLAIN)
    assert ("o wo", Origin.ACCEPTED) in shown
    assert not list(view.new_text(answer))


def test_ctrl_c_is_noted_once_and_strikes_the_second_time() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_default_model_repeats_what_it_is_told(outrider: Outrider) -> None:
    text = "The outrider is a horseman who rides ahead of a carriage. He looks at the road."
    run = outrider("chat", "--once", f"Repeat the following text: {text}", "--max-tokens", 12, "--max-model-len", 256)
    assert run.status == 0, run.err
    assert run.out.startswith("The outrider is a horseman who rides")
    length = re.search(r"acceptance length (\d\.\d+)", run.err)
    assert length is not None
    assert float(length[1]) > 2


def test_an_interrupted_answer_to_one_question_ends_with_130(tiny: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def interrupted() -> Iterator[Interruption]:
        interruption = Interruption()
        interruption.wanted = True
        yield interruption

    monkeypatch.setattr("outrider.cli.chat.interruptible", interrupted)
    run = tiny("chat", "--once", "hello", "--max-tokens", 8)
    assert run.status == 130
    assert "stopped" in run.err
