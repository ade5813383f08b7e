"""The HTTP application: routes, error handlers and middleware."""

from __future__ import annotations

from fastapi import FastAPI

from outrider import __version__
from outrider.server.front.service import Service
from outrider.server.http import errors
from outrider.server.http.bodies import BodyLimits
from outrider.server.http.counting import Counting
from outrider.server.http.hosts import Hosts
from outrider.server.http.keys import Keys
from outrider.server.routes import chat, completions, page, pages, responses, speculation, state, tokenize


def make_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="Outrider",
        version=__version__,
        description="LLM inference built around speculative decoding, behind OpenAI's API.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    errors.install(app)
    for module in (state, completions, chat, responses, tokenize, pages, speculation, page):
        app.include_router(module.router)
    # The middleware that is added last runs first.
    config = service.config
    app.add_middleware(BodyLimits, bytes_max=config.body_bytes_max, limit_s=config.idle_limit_s)
    app.add_middleware(Keys, config=config)
    if config.is_loopback and not config.api_keys:
        advice = "start it with --api-key, or with --allowed-host"
        app.add_middleware(Hosts, allowed=config.allowed_hosts, advice=advice)
    app.add_middleware(Counting, metrics=service.metrics)
    return app
