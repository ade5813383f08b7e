"""Workers that fail: another one takes their place until the client has seen a byte, and never after that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from tests.proxy.fakes import (
    LIMIT_S,
    Behaviour,
    Exchange,
    FakeWorker,
    Running,
    close,
    decode,
    hang,
    prefill,
    refuse,
    running,
    until,
)

EVENT = 'data: {"n":%d}\n\n'


async def stream_and_die(exchange: Exchange) -> None:
    """Two events and a half."""
    await exchange.begin_stream()
    await exchange.send(EVENT % 1 + EVENT % 2)
    await exchange.send('data: {"n":3')
    await asyncio.sleep(0.1)
    exchange.writer.transport.abort()


async def begin_and_die(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await asyncio.sleep(0.05)
    exchange.writer.transport.abort()


async def stream(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(EVENT % 7 + "data: [DONE]\n\n")
    await exchange.end_stream()


async def half_an_answer(exchange: Exchange) -> None:
    exchange.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
    await exchange.writer.drain()
    exchange.writer.transport.abort()


async def nonsense(exchange: Exchange) -> None:
    exchange.writer.write(b"SSH-2.0-x\r\n\r\n")
    await exchange.writer.drain()


def one_after_another(*behaviours: Behaviour) -> Behaviour:
    waiting = list(behaviours)

    async def behave(exchange: Exchange) -> None:
        await (waiting.pop(0) if len(waiting) > 1 else waiting[0])(exchange)

    return behave


def asked(workers: Sequence[FakeWorker]) -> int:
    return sum(len(worker.requests) for worker in workers)


@pytest.mark.parametrize("failing", [refuse, close, half_an_answer, nonsense, hang])
def test_another_prefill_worker_is_asked(failing: Behaviour) -> None:
    async def scenario() -> None:
        broken, good, d = FakeWorker(failing), FakeWorker(prefill), FakeWorker(decode)
        async with running([broken, good], [d], prefill_limit_s=0.3) as proxy:
            # Whichever comes first, two requests meet the broken one at least once.
            answers = [await proxy.complete() for _ in range(2)]
            assert [answer.json() for answer in answers] == [{"choices": [{"text": "ok"}]}] * 2
            assert asked([broken]) >= 1
            assert asked([good]) == 2
            assert all("ticket" in sent.json["kv_transfer_params"] for sent in d.requests)
            assert await proxy.metric("worker_failures_total", role="prefill") == asked([broken])
            assert await proxy.metric("hand_offs_total", outcome="handed_over") == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("failing", [refuse, close, hang])
def test_without_a_prefill_worker_the_decode_worker_gets_the_plain_request(failing: Behaviour) -> None:
    async def scenario() -> None:
        broken, d = FakeWorker(failing), FakeWorker(decode)
        async with running([broken], [d], prefill_limit_s=0.3) as proxy:
            assert (await proxy.complete()).status_code == 200
            assert d.requests[0].json == {"prompt": "Once upon a time"}
            assert await proxy.metric("hand_offs_total", outcome="no_prefill_worker") == 1

    asyncio.run(scenario())


def test_a_decode_worker_that_computes_no_prompts_and_no_prefill_worker_make_a_503() -> None:
    async def picky(exchange: Exchange) -> None:
        await exchange.answer('{"error":{"message":"no KV","code":"kv_transfer_missing"}}', status=400)

    async def scenario() -> httpx.Response:
        async with running([FakeWorker(refuse)], [FakeWorker(picky)]) as proxy:
            return await proxy.complete()

    answer = asyncio.run(scenario())
    assert answer.status_code == 503
    assert "no prefill worker" in answer.json()["error"]["message"]


REFUSED = '{"error":{"message":"the prompt is too long","code":"context_length_exceeded"}}'


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_client_learns_why_a_prefill_worker_refused_its_request(status: int) -> None:
    """A decode worker that computes no prompts does not look at a request without KV, so it cannot say what is wrong
    with it."""

    async def wrong(exchange: Exchange) -> None:
        await exchange.answer(REFUSED, status=status)

    async def picky(exchange: Exchange) -> None:
        await exchange.answer('{"error":{"message":"no KV","code":"kv_transfer_missing"}}', status=400)

    async def scenario() -> None:
        p, d = [FakeWorker(wrong) for _ in range(3)], [FakeWorker(picky) for _ in range(3)]
        async with running(p, d) as proxy:
            answer = await proxy.complete()
            assert (answer.status_code, answer.text) == (status, REFUSED)
            assert (asked(p), asked(d)) == (1, 1)
            assert await proxy.metric("worker_failures_total") == 0
            assert await proxy.metric("hand_offs_total", outcome="refused") == 1

    asyncio.run(scenario())


def test_a_prompt_that_was_refused_is_not_handed_over_again() -> None:
    async def wrong(exchange: Exchange) -> None:
        await exchange.answer(REFUSED, status=400)

    async def scenario() -> None:
        p, d = [FakeWorker(wrong) for _ in range(3)], [FakeWorker(each) for each in (close, close, decode)]
        async with running(p, d) as proxy:
            # A prompt that is too long for the prefill worker, for example, but not for the decode worker.
            for _ in range(3):
                assert (await proxy.complete()).status_code == 200
            assert asked(d) > 3
            assert asked(p) == 3

    asyncio.run(scenario())


def test_a_prefill_worker_that_took_too_long_is_replaced() -> None:
    async def late(exchange: Exchange) -> None:
        await exchange.answer('{"error":{"message":"too slow","code":"timeout"}}', status=504)

    async def scenario() -> None:
        p, d = [FakeWorker(late), FakeWorker(prefill)], FakeWorker(decode)
        async with running(p, [d]) as proxy:
            for _ in range(2):
                assert (await proxy.complete()).status_code == 200
            assert all("kv_transfer_params" in sent.json for sent in d.requests)

    asyncio.run(scenario())


def test_a_decode_worker_that_cannot_be_reached_costs_no_second_hand_off() -> None:
    async def scenario() -> None:
        p, gone, good = FakeWorker(prefill), FakeWorker(decode), FakeWorker(decode)
        async with running([p], [gone, good], health_interval_s=60.0) as proxy:
            # The proxy still takes it for ready.
            await gone.stop()
            for _ in range(2):
                assert (await proxy.complete()).status_code == 200
            assert (asked([gone]), asked([good]), asked([p])) == (0, 2, 2)

    asyncio.run(scenario())


@pytest.mark.parametrize("failing", [refuse, close, half_an_answer, nonsense, begin_and_die])
def test_another_decode_worker_gets_a_hand_off_of_its_own(failing: Behaviour) -> None:
    async def scenario() -> None:
        tickets = iter(range(1, 9))

        async def numbered(exchange: Exchange) -> None:
            await exchange.answer(json.dumps({"kv_transfer_params": {"ticket": next(tickets)}}))

        p, broken, good = FakeWorker(numbered), FakeWorker(failing), FakeWorker(decode)
        async with running([p], [broken, good], health_interval_s=60.0) as proxy:
            answers = [await proxy.complete() for _ in range(2)]
            assert [answer.json() for answer in answers] == [{"choices": [{"text": "ok"}]}] * 2
            assert asked([broken]) >= 1
            used = [sent.json["kv_transfer_params"]["ticket"] for sent in broken.requests + good.requests]
            assert len(set(used)) == len(used), "a ticket that another worker may have used is used again"
            assert await proxy.metric("worker_failures_total", role="decode") == asked([broken])

    asyncio.run(scenario())


def test_the_last_refusal_is_passed_on() -> None:
    async def scenario() -> tuple[httpx.Response, int]:
        workers = [FakeWorker(refuse) for _ in range(5)]
        async with running([FakeWorker(prefill)], workers) as proxy:
            return await proxy.complete(), asked(workers)

    answer, tried = asyncio.run(scenario())
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "not now")
    assert answer.headers["retry-after"] == "7"
    assert tried == 3, "a request that ends workers must not end all of them"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_request_that_is_wrong_is_not_sent_again(status: int) -> None:
    async def wrong(exchange: Exchange) -> None:
        await exchange.answer('{"error":{"message":"wrong"}}', status=status)

    async def scenario() -> None:
        prefill_workers, decode_workers = [FakeWorker(wrong), FakeWorker(wrong)], [FakeWorker(wrong), FakeWorker(wrong)]
        async with running(prefill_workers, decode_workers) as proxy:
            answer = await proxy.complete()
            assert (answer.status_code, answer.json()["error"]["message"]) == (status, "wrong")
            assert (asked(prefill_workers), asked(decode_workers)) == (1, 1)

    asyncio.run(scenario())


def test_without_any_decode_worker_the_answer_says_so() -> None:
    async def scenario() -> tuple[httpx.Response, httpx.Response, int]:
        p, d = FakeWorker(prefill), FakeWorker(decode)
        async with running([p], [d]) as proxy:
            await d.stop()
            await until(lambda: proxy.proxy.workers.choose(proxy.proxy.workers.decode[0].role, ()) is None)
            return await proxy.complete(), await proxy.client.get("/ready"), asked([p])

    answer, ready, prompts = asyncio.run(scenario())
    assert (answer.status_code, ready.status_code) == (503, 503)
    assert "of 1: 1 does not answer" in answer.json()["error"]["message"]
    assert prompts == 0, "a prompt was computed that no worker can continue"


# ---- streams ---------------------------------------------------------------------------------------


async def streamed(proxy: Running, path: str = "/v1/completions", **fields: Any) -> str:
    async with proxy.client.stream("POST", path, json={"prompt": "x", "input": "x", "stream": True} | fields) as answer:
        assert answer.status_code == 200, await answer.aread()
        return "".join([text async for text in answer.aiter_text()])


def test_a_worker_lost_in_the_middle_of_a_stream_ends_it_with_an_error() -> None:
    async def scenario() -> tuple[str, float, int]:
        d = FakeWorker(stream_and_die)
        async with running([FakeWorker(prefill)], [d], health_interval_s=60.0) as proxy:
            return await streamed(proxy), await proxy.metric("streams_lost_total"), asked([d])

    text, lost, tries = asyncio.run(scenario())
    assert tries == 1, "the answer was begun anew"
    events = text.split("\n\n")
    assert events[:2] == ['data: {"n":1}', 'data: {"n":2}']
    assert events[3:] == ["data: [DONE]", ""]
    error = json.loads(events[2].removeprefix("data: "))["error"]
    assert (error["code"], lost) == ("worker_lost", 1)
    assert "not complete" in error["message"]


def test_a_lost_stream_of_responses_ends_with_an_event_of_that_api() -> None:
    async def scenario() -> str:
        async with running([FakeWorker(prefill)], [FakeWorker(stream_and_die)]) as proxy:
            return await streamed(proxy, "/v1/responses")

    last = asyncio.run(scenario()).split("\n\n")[2].split("\n")
    assert last[0] == "event: error"
    assert json.loads(last[1].removeprefix("data: "))["type"] == "error"


def test_a_stream_that_breaks_off_before_its_first_event_goes_elsewhere() -> None:
    async def scenario() -> list[str]:
        workers = [FakeWorker(begin_and_die), FakeWorker(stream)]
        async with running([FakeWorker(prefill)], workers, health_interval_s=60.0) as proxy:
            return [await streamed(proxy) for _ in range(2)]

    assert asyncio.run(scenario()) == [EVENT % 7 + "data: [DONE]\n\n"] * 2


def test_events_are_passed_on_at_once() -> None:
    async def scenario() -> None:
        seen = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await exchange.begin_stream()
            await exchange.send(EVENT % 1)
            async with asyncio.timeout(LIMIT_S):
                await seen.wait()
            await exchange.send(EVENT % 2)
            await exchange.end_stream()

        fields = {"prompt": "x", "stream": True}
        async with (
            running([FakeWorker(prefill)], [FakeWorker(waits)]) as proxy,
            proxy.client.stream("POST", "/v1/completions", json=fields) as answer,
        ):
            texts = answer.aiter_text()
            assert await anext(texts) == EVENT % 1
            seen.set()
            assert await anext(texts) == EVENT % 2

    asyncio.run(scenario())


def test_a_worker_that_falls_silent_is_given_up_in_bounded_time() -> None:
    """It keeps its connections open, as a suspended machine does."""

    async def half_stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(EVENT % 1)
        await exchange.hang()

    async def scenario() -> tuple[str, httpx.Response]:
        p, silent = FakeWorker(prefill), FakeWorker(one_after_another(half_stream, hang))
        async with running([p], [silent]) as proxy:
            waiting = asyncio.create_task(streamed(proxy))
            await until(lambda: len(silent.requests) == 1)
            unanswered = asyncio.create_task(proxy.complete())
            await until(lambda: len(silent.requests) == 2)
            silent.is_silent = True
            async with asyncio.timeout(LIMIT_S / 2):
                return await waiting, await unanswered

    text, answer = asyncio.run(scenario())
    assert text.startswith(EVENT % 1)
    assert "worker_lost" in text
    assert answer.status_code == 503


def test_a_worker_that_comes_back_is_used_again() -> None:
    async def scenario() -> None:
        p, d = FakeWorker(prefill), FakeWorker(decode)
        async with running([p], [d]) as proxy:
            d.states["/ready"] = (503, "{}")
            await until(lambda: proxy.proxy.workers.decode[0].state.name == "NOT_READY")
            assert (await proxy.complete()).status_code == 503
            del d.states["/ready"]
            await until(lambda: proxy.proxy.workers.decode[0].state.name == "READY")
            assert (await proxy.complete()).status_code == 200

    asyncio.run(scenario())


# ---- clients that leave ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["prefill", "decode", "stream"])
def test_a_client_that_leaves_ends_the_work(where: str) -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(EVENT % 1)
        await exchange.hang()

    async def scenario() -> None:
        p = FakeWorker(hang if where == "prefill" else prefill)
        d = FakeWorker(endless if where == "stream" else hang)
        async with running([p], [d]) as proxy:
            busy = p if where == "prefill" else d
            leaving = asyncio.create_task(streamed(proxy) if where == "stream" else proxy.complete())  # type: ignore[arg-type]
            await until(lambda: len(busy.requests) == 1)
            leaving.cancel()
            await until(busy.requests[0].closed.is_set)
            await until(lambda: proxy.proxy.num_jobs == 0)
            assert [worker.num_requests for worker in proxy.proxy.workers.all] == [0, 0]
            assert asked([d]) == (where != "prefill")

    asyncio.run(scenario())
