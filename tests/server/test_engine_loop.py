"""Orders that the engine process takes while grammars are compiled."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import zmq
from tests.matching.test_compiling import held_engine, regex
from tests.server.running import wait_until

from outrider.errors import NotNowError, RequestError
from outrider.grammar import Grammar
from outrider.sampling import SamplingParams
from outrider.server.engine_process.loop import FAILED_STEPS_MAX, EngineLoop
from outrider.server.messages import Abort, Refused, StepReport, Submit, ToEngine, decode_to_front, encode


def order(name: str, form: str) -> Submit:
    params = SamplingParams(temperature=0, grammar=regex(form))
    return Submit(request_id=name, prompt_token_ids=[1, 2, 3], params=params, arrival_s=0.0)


def test_what_is_refused_for_now_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _compiler = held_engine()
    assert engine.grammars is not None
    reasons = iter([NotNowError("later"), RequestError("never"), ZeroDivisionError("a bug")])

    def refuse(grammar: Grammar) -> NoReturn:
        raise next(reasons)

    monkeypatch.setattr(engine.grammars, "compile", refuse)
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.PAIR) as front, context.socket(zmq.PAIR) as socket:
        front.bind("inproc://engine")
        socket.connect("inproc://engine")
        loop = EngineLoop(engine, socket)
        told = []
        for name in "abc":
            front.send(encode(order(name, "aa")))
            loop._take_orders(wait=False)
            told.append(decode_to_front(front.recv()))
            assert isinstance(decode_to_front(front.recv()), StepReport)
    context.destroy(linger=0)
    assert told == [
        Refused(request_id="a", message="later", is_for_now=True),
        Refused(request_id="b", message="never"),
        Refused(request_id="c", message="ZeroDivisionError: a bug", is_ours=True),
    ]


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled() -> None:
    engine, compiler = held_engine()
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.PAIR) as front, context.socket(zmq.PAIR) as socket:
        front.bind("inproc://engine")
        socket.connect("inproc://engine")
        loop = EngineLoop(engine, socket)

        def take(*messages: ToEngine) -> None:
            for message in messages:
                front.send(encode(message))
            loop._take_orders(wait=False)

        take(order("a", "aa"), order("b", "bb"), order("c", "cc"), order("d", "cc"), order("e", "dd"))
        wait_until(lambda: compiler.asked == ["aa"])
        take(*(Abort(request_id=name) for name in "abc"))
        compiler.let.set()
        # The last of all: those before it have had their turn.
        loop._compiling["e"][1].result()
        assert compiler.asked == ["aa", "cc", "dd"]
        take()
        assert set(loop._reporters) == {"d", "e"}
    context.destroy(linger=0)


def test_a_process_whose_steps_fail_in_a_row_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _compiler = held_engine()
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.PAIR) as front, context.socket(zmq.PAIR) as socket:
        front.bind("inproc://engine")
        socket.connect("inproc://engine")
        loop, broken = EngineLoop(engine, socket), True

        def step() -> list[Any]:
            if broken:
                raise ValueError("it is broken")
            return []

        monkeypatch.setattr(engine, "step", step)
        for _ in range(FAILED_STEPS_MAX - 1):
            loop._step()
        broken = False
        loop._step()
        broken = True
        for _ in range(FAILED_STEPS_MAX - 1):
            loop._step()
        with pytest.raises(ValueError, match="it is broken"):
            loop._step()
    context.destroy(linger=0)
