"""Turns orders to the engine into an HTTP response, whole or streamed. Routes differ in their `Writer`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from outrider.sampling import SamplingParams
from outrider.server.front.problems import Problem
from outrider.server.front.service import Answers, Service
from outrider.server.front.totals import Totals
from outrider.server.front.transfers import hand_off_of, transfer_answer
from outrider.server.http.answers import json_answer
from outrider.server.http.counting import ARRIVAL
from outrider.server.http.event_stream import EventStream, unless_disconnected
from outrider.server.http.keys import TENANT
from outrider.server.messages import Delta, Submit
from outrider.server.protocol.fields import GenerationFields

DISCONNECTED_STATUS = 499


class Writer(Protocol):
    """Writes one answer. It gets every delta, in order; then `last` ends a stream, or `whole` returns the response."""

    def first(self) -> Iterable[bytes]:
        """Returns the events before the first token."""

    def delta(self, place: int, delta: Delta, totals: Totals) -> Iterable[bytes]:
        """Returns the events for what an order has gained; an answer that is not streamed keeps it and returns none."""

    def last(self, totals: Totals) -> Iterable[bytes]:
        """Returns the events at the end of the stream."""

    def failed(self, problem: Problem) -> Iterable[bytes]:
        """Returns the events at the end of a stream that failed."""

    def whole(self, totals: Totals) -> dict[str, Any]: ...


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def tenant_name(request: Request) -> str:
    """Returns the tenant of a request; empty on a server without keys, where all clients are one tenant."""
    return str(request.scope.get(TENANT, ""))


def order_for(request: Request, body: GenerationFields, name: str, ids: list[int], params: SamplingParams) -> Submit:
    """Returns the order to the engine for one prompt of a request."""
    tenant, hand_off = tenant_name(request), hand_off_of(body, service_of(request).facts)
    return Submit(
        request_id=name,
        prompt_token_ids=ids,
        params=params,
        arrival_s=request.scope[ARRIVAL],
        tenant=tenant,
        # Tenants are kept apart in the prefix cache, whatever salts they choose.
        salt=f"{tenant}:{body.cache_salt}" if body.cache_salt else tenant,
        priority=body.priority,
        speculate=body.speculate,
        num_speculative_tokens=body.num_speculative_tokens,
        stream=bool(body.stream),
        hand_over=hand_off.hand_over,
        ticket=hand_off.ticket,
        compute_prompt=hand_off.compute_prompt,
    )


async def respond(
    request: Request, orders: Sequence[Submit], writer: Writer, *, name: str, model: str, stream: bool
) -> Response:
    """Runs the orders and answers the request. `name` is the answer's id for the client."""
    service, totals = service_of(request), Totals(orders)

    def ended() -> None:
        service.tracer.record(request.headers, name, model, totals)

    stack = AsyncExitStack()
    stack.callback(ended)
    if not stream:
        answer = await unless_disconnected(request, _whole(service, stack, orders, writer, totals))
        return Response(status_code=DISCONNECTED_STATUS) if answer is None else answer
    try:
        # Wait until the engine accepts, so that a refusal has an HTTP status of its own.
        answers = await unless_disconnected(request, _begin(service, stack, orders))
    except BaseException:
        await stack.aclose()
        raise
    if answers is None:
        await stack.aclose()
        return Response(status_code=DISCONNECTED_STATUS)
    return EventStream(_events(answers, writer, totals), stack, idle_limit_s=service.config.idle_limit_s)


async def _whole(
    service: Service, stack: AsyncExitStack, orders: Sequence[Submit], writer: Writer, totals: Totals
) -> Response:
    async with stack, service.generate(orders) as answers:
        async for place, delta in answers.deltas():
            totals.take(delta)
            for _event in writer.delta(place, delta, totals):
                raise AssertionError("an answer that is not streamed has no events")
    content = writer.whole(totals)
    if orders[0].hand_over:
        content["kv_transfer_params"] = transfer_answer(totals.endings[0], orders[0].request_id, service.facts)
    return json_answer(content)


async def _begin(service: Service, stack: AsyncExitStack, orders: Sequence[Submit]) -> Answers:
    answers = await stack.enter_async_context(service.generate(orders))
    if any(order.ticket is not None for order in orders):
        # KV of another worker may turn out to be missing, which is no success either.
        await answers.begun()
    return answers


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
