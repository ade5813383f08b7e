"""What reaches the engine of what a client says, on each of the three routes that generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from tests.server.test_tools import FACTS

from outrider.server.config import ServerConfig
from outrider.server.front.problems import Problem
from outrider.server.front.service import Answers, Service
from outrider.server.http.app import make_app
from outrider.server.http.keys import tenant_of
from outrider.server.messages import Submit
from outrider.server.observe.figures import Figures
from outrider.server.observe.metrics import Metrics
from outrider.server.observe.tracing import Tracer
from outrider.server.text_process.messages import Render

KEY = "key"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 9},
    "/v1/responses": {"input": "?", "max_output_tokens": 9},
}
RECOMMENDED = {"temperature": 0.2, "top_p": 0.9, "top_k": 7}


class Recording(Service):
    """Ready at once; keeps the orders, and refuses them."""

    def __init__(self) -> None:
        config = ServerConfig(api_keys=(KEY,))
        facts = msgspec.structs.replace(
            FACTS, text=msgspec.structs.replace(FACTS.text, templates={"default": "?"}), sampling_defaults=RECOMMENDED
        )
        supervisor: Any = SimpleNamespace(facts=facts)
        super().__init__(config, supervisor, Metrics(config.metrics_prefix, Figures(), "m"), Tracer())
        self.orders: list[Submit] = []
        texts: Any = object()
        self._token_texts = texts

    def check_ready(self) -> None:
        pass

    async def render(self, order: Render) -> list[int]:
        return [1, 2, 3]

    @asynccontextmanager
    async def generate(self, orders: Sequence[Submit]) -> AsyncGenerator[Answers, None]:
        self.orders += orders
        raise Problem("noted")
        yield  # for it to be a generator


def ordered(path: str, **fields: Any) -> Submit:
    async def ask() -> Submit:
        service = Recording()
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = ROUTES[path] | fields
            answer = await client.post(path, json=body, headers={"Authorization": f"Bearer {KEY}"})
        assert answer.json()["error"]["message"] == "noted", answer.text
        (order,) = service.orders
        return order

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ROUTES)
def test_what_a_client_sets_reaches_the_engine(path: str) -> None:
    settings = {"temperature": 0.5, "top_p": 0.75, "top_k": 5, "min_p": 0.125, "seed": 3, "ignore_eos": True}
    order = ordered(path, **settings, priority=7, speculate=False, cache_salt="mine", stream=True)
    assert (order.priority, order.speculate, order.stream) == (7, False, True)
    assert ordered(path, num_speculative_tokens=2).num_speculative_tokens == 2
    assert (order.tenant, order.salt) == (tenant_of(KEY), f"{tenant_of(KEY)}:mine")
    assert order.prompt_token_ids == [1, 2, 3]
    assert {name: getattr(order.params, name) for name in settings} == settings
    assert order.params.max_tokens == 9


@pytest.mark.parametrize("path", ROUTES)
def test_what_a_client_does_not_set_is_as_documented(path: str) -> None:
    order = ordered(path)
    assert (order.priority, order.speculate, order.num_speculative_tokens, order.stream) == (0, True, None, False)
    assert (order.tenant, order.salt) == (tenant_of(KEY), tenant_of(KEY))
    assert {name: getattr(order.params, name) for name in RECOMMENDED} == RECOMMENDED
    # Whoever sets a temperature has other plans than the model's makers.
    own = ordered(path, temperature=1.5).params
    assert (own.temperature, own.top_p, own.top_k) == (1.5, 1.0, own.top_k)
    assert own.top_k != RECOMMENDED["top_k"]
