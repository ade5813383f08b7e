"""From orders to an HTTP answer, whole or as a stream; what differs between routes is their `Writer`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from outrider.server.front.problems import Problem
from outrider.server.front.service import Answers, Service
from outrider.server.front.totals import Totals
from outrider.server.http.answers import json_answer
from outrider.server.http.event_stream import EventStream, event, unless_client_leaves
from outrider.server.http.keys import TENANT
from outrider.server.messages import Delta, Submit

CLIENT_LEFT_STATUS = 499


class Writer(Protocol):
    """One answer. It is told every delta, in order, and then either `last` or `whole` is asked for."""

    def first(self) -> Iterable[bytes]:
        """Events before anything has been generated."""

    def delta(self, place: int, delta: Delta, totals: Totals) -> Iterable[bytes]:
        """Events for what an order has gained; an answer that is no stream keeps it and returns none."""

    def last(self, totals: Totals) -> Iterable[bytes]:
        """The end of the stream."""

    def failed(self, problem: Problem) -> Iterable[bytes]:
        """The end of a stream that could not go on."""

    def whole(self, totals: Totals) -> dict[str, Any]: ...


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def tenant_name(request: Request) -> str:
    """Empty where there are no keys: then everybody is the same one."""
    return str(request.scope.get(TENANT, ""))


def tenant_salt(request: Request, cache_salt: str | None) -> str:
    """Prompts of different tenants never meet in the prefix cache, whatever salt they choose."""
    tenant = tenant_name(request)
    return f"{tenant}:{cache_salt}" if cache_salt else tenant


async def respond(
    request: Request, orders: Sequence[Submit], writer: Writer, *, name: str, model: str, stream: bool
) -> Response:
    """`name`: what the client knows the answer by."""
    service, totals = service_of(request), Totals(orders)

    def ended() -> None:
        service.tracer.record(request.headers, name, model, totals)

    stack = AsyncExitStack()
    stack.callback(ended)
    if not stream:
        answer = await unless_client_leaves(request, _whole(service, stack, orders, writer, totals))
        return Response(status_code=CLIENT_LEFT_STATUS) if answer is None else answer
    try:
        # What is refused is refused with a status of its own, before the stream begins. A grammar may take its time.
        answers = await unless_client_leaves(request, stack.enter_async_context(service.generate(orders)))
    except BaseException:
        await stack.aclose()
        raise
    if answers is None:
        await stack.aclose()
        return Response(status_code=CLIENT_LEFT_STATUS)
    return EventStream(_events(answers, writer, totals), stack, idle_limit_s=service.config.idle_limit_s)


async def _whole(
    service: Service, stack: AsyncExitStack, orders: Sequence[Submit], writer: Writer, totals: Totals
) -> Response:
    async with stack, service.generate(orders) as answers:
        async for place, delta in answers.deltas():
            totals.take(delta)
            for _event in writer.delta(place, delta, totals):
                raise AssertionError("an answer that is no stream has no events")
    return json_answer(writer.whole(totals))


async def _events(answers: Answers, writer: Writer, totals: Totals) -> AsyncGenerator[bytes, None]:
    try:
        for chunk in writer.first():
            yield chunk
        async for place, delta in answers.deltas():
            totals.take(delta)
            for chunk in writer.delta(place, delta, totals):
                yield chunk
        for chunk in writer.last(totals):
            yield chunk
    except Problem as problem:
        for chunk in writer.failed(problem):
            yield chunk


def error_event(problem: Problem) -> bytes:
    return event(problem.body())
