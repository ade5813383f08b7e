"""Orders that the engine process takes, refuses or fails to carry out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import zmq
from tests.engine.tiny import tiny_engine
from tests.structured.ending import ending_model

from outrider.errors import NotNowError, RequestError
from outrider.grammar import Grammar, GrammarKind
from outrider.sampling import SamplingParams
from outrider.server.engine_process.loop import FAILED_STEPS_MAX, EngineLoop
from outrider.server.messages import Refused, StepReport, Submit, decode_to_front, encode

Sockets = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


def order(name: str, expression: str) -> Submit:
    grammar = Grammar(kind=GrammarKind.REGEX, text=expression)
    params = SamplingParams(temperature=0, grammar=grammar)
    return Submit(request_id=name, prompt_token_ids=[1, 2, 3], params=params, arrival_s=0.0)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Both ends of what connects the front end with the engine process."""
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.PAIR) as front, context.socket(zmq.PAIR) as engine:
        front.bind("inproc://engine")
        engine.connect("inproc://engine")
        yield front, engine
    context.destroy(linger=0)


def test_what_is_refused_for_now_is_told_apart(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(ending_model())
    assert engine.grammars is not None
    reasons = iter([NotNowError("later"), RequestError("never"), ZeroDivisionError("a bug")])

    def refuse(grammar: Grammar) -> NoReturn:
        raise next(reasons)

    monkeypatch.setattr(engine.grammars, "matcher", refuse)
    front, socket = sockets
    loop = EngineLoop(engine, socket)
    told = []
    for name in "abc":
        front.send(encode(order(name, "aa")))
        loop._take_orders(wait=False)
        told.append(decode_to_front(front.recv()))
        assert isinstance(decode_to_front(front.recv()), StepReport)
    assert told == [
        Refused(request_id="a", message="later", is_for_now=True),
        Refused(request_id="b", message="never"),
        Refused(request_id="c", message="ZeroDivisionError: a bug", is_engine_fault=True),
    ]


def test_a_process_whose_steps_fail_in_a_row_gives_up(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(ending_model())
    _front, socket = sockets
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
