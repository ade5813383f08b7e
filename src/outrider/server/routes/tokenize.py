"""The routes POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.server.front.conversation import render_order
from outrider.server.front.problems import Problem
from outrider.server.http.answers import json_answer
from outrider.server.http.bodies import JsonRoute
from outrider.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from outrider.server.routes.documented import PROBLEMS
from outrider.server.routes.respond import service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize", responses=PROBLEMS, summary="Token ids of a text or a conversation")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    service = service_of(request)
    service.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Problem("give either a prompt or messages")
    # Texts that are too long for the model can be counted too; only the size of a body limits them.
    most = service.config.body_bytes_max
    if body.prompt is not None:
        ids = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens, tokens_max=most)
    else:
        ids = await service.render(render_order(body, service.config, service.facts, with_tools=True, tokens_max=most))
    answer = {"count": len(ids), "max_model_len": service.facts.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [service.token_texts.tokenizer.token(token) for token in ids]
    return json_answer(answer)


@router.post("/detokenize", responses=PROBLEMS, summary="The text of token ids")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    service = service_of(request)
    service.model_name(body.model)
    service.check_token_ids(body.tokens, "tokens")
    return json_answer({"prompt": service.token_texts.tokenizer.decode(body.tokens, skip_special_tokens=False)})
