"""The route GET /: the playground and its files."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.server.front.problems import Problem
from outrider.server.page import FILES

router = APIRouter(include_in_schema=False)

HEADERS = {
    # Scripts, styles and requests only from and to this server, no frames, no HTML made from text.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A later version may serve other files at the same address.
    "Cache-Control": "no-cache",
}


@router.head("/", include_in_schema=False)
@router.head("/page/{name}", include_in_schema=False)
@router.get("/")
@router.get("/page/{name}")
async def page(request: Request) -> Response:
    file = FILES.get(request.scope["path"])
    if file is None:
        raise Problem("there is no such route", status=404, code="not_found")
    return Response(file.content, headers={**HEADERS, "Content-Type": file.media_type})
