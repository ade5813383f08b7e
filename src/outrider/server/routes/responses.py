"""The route POST /v1/responses: a chat completion, told as items and typed events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.server.front.problems import Problem
from outrider.server.front.service import Service
from outrider.server.front.tool_calls import CallPiece
from outrider.server.front.totals import Totals
from outrider.server.front.transfers import cut_to_first_token
from outrider.server.http.bodies import JsonRoute
from outrider.server.http.event_stream import event
from outrider.server.messages import Delta
from outrider.server.protocol.chat import ChatRequest
from outrider.server.protocol.responses import ResponsesRequest
from outrider.server.routes.chat import ChatChoice, chat_order
from outrider.server.routes.chunks import extras
from outrider.server.routes.documented import GENERATES
from outrider.server.routes.logprobs import chat_logprobs
from outrider.server.routes.respond import respond, service_of
from outrider.server.routes.responses_input import as_chat

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", responses=GENERATES, summary="Answer a conversation, item by item")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    service = service_of(request)
    model = service.model_name(body.model)
    service.check_ready()
    name = f"resp_{secrets.token_hex(12)}"
    chat = cut_to_first_token(as_chat(body))
    order = await chat_order(chat, request, name=name)
    writer = ResponseWriter(service, body, chat, name=name, model=model)
    return await respond(request, [order], writer, name=name, model=model, stream=bool(body.stream))


class ResponseWriter:
    def __init__(self, service: Service, body: ResponsesRequest, chat: ChatRequest, *, name: str, model: str) -> None:
        self._service = service
        self._body = body
        self._choice = ChatChoice(chat)
        self._chat = chat
        self._name = name
        self._model = model
        self._created = int(time.time())
        self._events = 0
        self._output: list[dict[str, Any]] = []
        """Items that are complete."""
        self._message: dict[str, Any] | None = None
        """The message that is being written, if any."""
        self._call: dict[str, Any] | None = None
        """The function call that is being written, if any."""
        self._finish: str | None = None
        self._pending: list[Delta] = []
        """Deltas whose tokens are not part of an event yet."""

    # ---- deltas --------------------------------------------------------------------------------------

    def delta(self, place: int, delta: Delta, totals: Totals) -> Iterable[bytes]:
        events = list(self._take(delta))
        return events if self._body.stream else ()

    def _take(self, delta: Delta) -> Iterator[bytes]:
        found = self._choice.take(delta, keep=False)
        self._pending.append(delta)
        if found.text:
            if self._message is None:
                yield from self._close_call()
                yield from self._open_message()
            yield self._add_text(found.text)
        for piece in found.calls:
            # The tokens of a call are not reported.
            self._pending.clear()
            yield from self._add_piece(piece)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            if not self._output and self._message is None and self._call is None:
                yield from self._open_message()
            if self._message is not None and self._reports_tokens and any(each.token_ids for each in self._pending):
                yield self._add_text("")
            yield from self._close_message()
            yield from self._close_call()

    def _open_message(self) -> Iterator[bytes]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._message = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        yield self._event("output_item.added", output_index=len(self._output), item=dict(self._message))
        self._message["content"] = [part]
        yield self._in_part("content_part.added", part=dict(part))

    @property
    def _reports_tokens(self) -> bool:
        return self._body.wants_logprobs or self._chat.return_token_origins

    def _add_text(self, text: str) -> bytes:
        assert self._message is not None
        part, deltas = self._message["content"][0], self._pending
        self._pending = []
        part["text"] += text
        scored = []
        if self._body.wants_logprobs:
            entries = [entry for delta in deltas for entry in delta.logprobs or ()]
            scored = chat_logprobs(entries, self._service.token_texts)
        part["logprobs"] = [*part["logprobs"], *scored]
        return self._in_part("output_text.delta", delta=text, logprobs=scored, **extras(self._chat, deltas))

    def _close_message(self) -> Iterator[bytes]:
        if self._message is None:
            return
        part = self._message["content"][0]
        yield self._in_part("output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._in_part("content_part.done", part=part)
        self._message["status"] = "incomplete" if self._finish == "length" else "completed"
        yield self._event("output_item.done", output_index=len(self._output), item=self._message)
        self._output.append(self._message)
        self._message = None

    def _add_piece(self, piece: CallPiece) -> Iterator[bytes]:
        if piece.name is not None:
            yield from self._close_message()
            yield from self._close_call()
            self._call = {
                "id": f"fc_{secrets.token_hex(12)}",
                "type": "function_call",
                "call_id": piece.id,
                "name": piece.name,
                "arguments": "",
                "status": "in_progress",
            }
            yield self._event("output_item.added", output_index=len(self._output), item=dict(self._call))
        assert self._call is not None
        if piece.arguments:
            self._call["arguments"] += piece.arguments
            where = {"item_id": self._call["id"], "output_index": len(self._output)}
            yield self._event("function_call_arguments.delta", **where, delta=piece.arguments)

    def _close_call(self) -> Iterator[bytes]:
        item, self._call = self._call, None
        if item is None:
            return
        item["status"] = "incomplete" if self._finish == "length" else "completed"
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("function_call_arguments.done", item_id=item["id"], output_index=len(self._output), **done)
        yield self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    # ---- events ------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        number, self._events = self._events, self._events + 1
        return event({"type": name, "sequence_number": number, **fields}, name)

    def _in_part(self, kind: str, **fields: Any) -> bytes:
        assert self._message is not None
        where = {"item_id": self._message["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **where, **fields)

    def first(self) -> Iterable[bytes]:
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def last(self, totals: Totals) -> Iterable[bytes]:
        status = self._status()
        yield self._event(status, response=self._response(status, totals))

    def failed(self, problem: Problem) -> Iterable[bytes]:
        error = {"code": "server_error", "message": str(problem)}
        yield self._event("failed", response=self._response("failed") | {"error": error})
        number, self._events = self._events, self._events + 1
        body = problem.body()["error"]
        yield event({**body, "type": "error", "sequence_number": number, "error": body}, "error")

    # ---- whole -------------------------------------------------------------------------------------

    def whole(self, totals: Totals) -> dict[str, Any]:
        return self._response(self._status(), totals)

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str, totals: Totals | None = None) -> dict[str, Any]:
        body = self._body
        response: dict[str, Any] = {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": False,
            "status": status,
            "model": self._model,
            "output": list(self._output),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs,
            "user": body.user,
            "text": {"format": _format(body)},
            "tool_choice": "auto" if body.tool_choice is None else _plain(body.tool_choice),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "truncation": "disabled",
            "usage": None,
        }
        if totals is not None:
            usage = totals.usage()
            response["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                # Writing to the cache is not billed.
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
            response["metrics"] = totals.metrics()
        return response


def _format(body: ResponsesRequest) -> dict[str, Any]:
    wanted = None if body.text is None else body.text.format
    return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)


def _plain(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump()
