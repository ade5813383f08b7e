"""Streams that end in every way there is, and let go of what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from outrider.sampling import SamplingParams
from outrider.server.front.problems import Problem
from outrider.server.front.service import Answers
from outrider.server.front.streams import Job, OpenRequests
from outrider.server.http.drain import Drain
from outrider.server.http.event_stream import EventStream
from outrider.server.messages import Abort, Accepted, Delta, Refused, Submit, ToEngine


class Recorder:
    """Stands where the engine's socket is."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)


def order(name: str, n: int = 1) -> Submit:
    return Submit(request_id=name, prompt_token_ids=[1], params=SamplingParams(n=n), arrival_s=0.0)


def delta(name: str, text: str) -> Delta:
    return Delta(request_id=name, index=0, text=text, token_ids=[], pieces=[], origins="")


def test_leaving_a_job_aborts_what_still_runs_and_frees_its_places() -> None:
    async def run() -> None:
        recorder = Recorder()
        requests = OpenRequests(recorder)
        with Job(requests, [order("a", n=3), order("b")]):
            assert requests.num_sequences == 4
            requests.deliver("b", Refused(request_id="b", message="no"))
            assert requests.num_sequences == 3
        assert recorder.sent[-1] == Abort(request_id="a")
        assert requests.num_sequences == len(requests) == 0
        requests.deliver("a", delta("a", "too late"))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("refused", "status", "retry_after"),
    [
        (Refused(request_id="a", message="no"), 400, None),
        (Refused(request_id="a", message="no", is_for_now=True), 503, "2"),
        (Refused(request_id="a", message="no", is_engine_fault=True), 500, None),
    ],
)
def test_a_refusal_says_whether_to_try_again(refused: Refused, status: int, retry_after: str | None) -> None:
    async def run() -> Problem:
        requests = OpenRequests(Recorder())
        with Job(requests, [order("a")]) as job:
            requests.deliver("a", refused)
            with pytest.raises(Problem, match="no") as raised:
                await Answers(job, 10).accepted()
        return raised.value

    problem = asyncio.run(run())
    assert (problem.status, problem.headers.get("Retry-After")) == (status, retry_after)


def test_a_drain_waits_for_clients_that_have_not_taken_all_of_their_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The engine may be done with a request long before a slow client is."""

    class Server:
        should_exit = force_exit = False

    async def drain_with_a_slow_client() -> None:
        requests, server = OpenRequests(Recorder()), Server()
        with Job(requests, [order("a")]):
            requests.deliver("a", Refused(request_id="a", message="it has ended, one way or another"))
            assert len(requests) == 0
            Drain(requests, server, limit_s=60, began=asyncio.Event()).begin()  # type: ignore[arg-type]
            # Time enough for a drain that sees no reason to wait.
            for _ in range(10):
                await asyncio.sleep(0)
            assert not server.should_exit
        while not server.should_exit:
            await asyncio.sleep(0)

    asyncio.run(drain_with_a_slow_client())
    assert "did not finish in time" not in caplog.text


def test_leaving_a_job_whose_engine_is_gone_is_no_error() -> None:
    class Gone:
        gone = False

        def send(self, message: ToEngine) -> None:
            if self.gone:
                raise Problem("the engine is not ready", status=503)

    async def leave() -> int:
        sender = Gone()
        requests = OpenRequests(sender)
        with Job(requests, [order("a")]):
            sender.gone = True
        return len(requests) + requests.num_sequences

    assert asyncio.run(leave()) == 0


def test_deltas_that_come_before_all_are_accepted_are_not_lost() -> None:
    async def run() -> None:
        requests = OpenRequests(Recorder())
        with Job(requests, [order("a"), order("b")]) as job:
            requests.deliver("a", Accepted(request_id="a"))
            requests.deliver("a", delta("a", "early"))
            requests.deliver("b", Accepted(request_id="b"))
            requests.deliver("a", delta("a", "later"))
            answers = Answers(job, 10)
            await answers.accepted()
            stream = answers.deltas()
            assert [(await anext(stream))[1].text for _ in range(2)] == ["early", "later"]

    asyncio.run(run())


def test_a_request_that_takes_too_long_is_given_up() -> None:
    async def run() -> None:
        with Job(OpenRequests(Recorder()), [order("a")]) as job:
            with pytest.raises(Problem, match="took longer") as caught:
                await Answers(job, 0.01).accepted()
            assert caught.value.status == 504

    asyncio.run(run())


@pytest.mark.parametrize("how", ["finished", "disconnected", "stuck", "broken"])
def test_a_stream_lets_go_however_it_ends(how: str) -> None:
    async def run() -> list[str]:
        log: list[str] = []

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                for _ in range(3):
                    yield b"data: x\n\n"
                if how == "disconnected":
                    await asyncio.sleep(60)
            finally:
                log.append("generator closed")

        async def receive() -> Any:
            await asyncio.sleep(0.02 if how == "disconnected" else 60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if how == "stuck" and message["type"] == "http.response.body":
                await asyncio.sleep(60)
            if how == "broken" and message["type"] == "http.response.body":
                raise OSError("gone")

        held = AsyncExitStack()
        held.callback(lambda: log.append("let go"))
        await asyncio.wait_for(EventStream(events(), held, idle_limit_s=0.05)({}, receive, send), 10)
        return log

    assert asyncio.run(run()) == ["generator closed", "let go"]
