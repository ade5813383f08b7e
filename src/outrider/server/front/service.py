"""What every route works with: the engine and its supervisor, the text processes, the tokenizer, the limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from outrider.errors import NotNowError, RequestError
from outrider.sampling import SamplingParams
from outrider.server.config import ServerConfig
from outrider.server.front.problems import Problem, queue_full, transfer_failed, unavailable
from outrider.server.front.streams import Arrival, Job
from outrider.server.front.supervisor import State, Supervisor
from outrider.server.front.tokens import TokenTexts
from outrider.server.front.transfers import FIELD
from outrider.server.messages import Accepted, Delta, Facts, Pages, Refused, Speculation, Submit
from outrider.server.observe.metrics import Metrics
from outrider.server.observe.tracing import Tracer
from outrider.server.text_process.messages import Encode, Render, TextOrder
from outrider.server.text_process.pool import TextPool


class Service:
    def __init__(self, config: ServerConfig, supervisor: Supervisor, metrics: Metrics, tracer: Tracer) -> None:
        self.config = config
        self.supervisor = supervisor
        self.metrics = metrics
        self.tracer = tracer
        self.drain_began = asyncio.Event()
        self.begin_drain: Callable[[], None] = lambda: None
        """Starts a drain; set by the code that runs the server."""
        self.started_s = time.time()
        self._text: TextPool | None = None
        self._token_texts: TokenTexts | None = None
        self._pages: Pages | None = None
        self._pages_s = 0.0
        self._speculation: Speculation | None = None
        self._speculation_s = 0.0
        self._looking = asyncio.Lock()

    async def prepare(self, facts: Facts) -> None:
        """Starts the text processes; called once, when the engine is ready for the first time."""
        self._token_texts = TokenTexts(facts.text.make_tokenizer())
        text = TextPool(facts.text, processes=self.config.text_processes, limit_s=self.config.render_limit_s)
        await text.start()
        self._text = text

    async def close(self) -> None:
        if self._text is not None:
            await self._text.close()

    # ---- state -------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self.drain_began.is_set()

    @property
    def why_not_ready(self) -> str | None:
        if self.draining:
            return "the server is draining"
        if self.supervisor.state is State.READY and self._text is not None:
            return None
        loading = self.supervisor.loading
        doing = f": {loading.what}, {loading.done} of {loading.total}" if loading is not None else ""
        return f"the engine is {'loading' if self.supervisor.facts is None else 'being restarted'}{doing}"

    @property
    def facts(self) -> Facts:
        if self.supervisor.facts is None:
            raise unavailable("the model is still loading; try again in a moment")
        return self.supervisor.facts

    @property
    def token_texts(self) -> TokenTexts:
        if self._token_texts is None:
            raise unavailable("the model is still loading; try again in a moment")
        return self._token_texts

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.served_model_names or (self.facts.model_name,)

    async def pages(self, *, max_age_s: float) -> Pages:
        """Returns the state of all KV pages, at most `max_age_s` old."""
        async with self._looking:
            if self._pages is None or time.monotonic() - self._pages_s > max_age_s:
                self._pages = await self.supervisor.pages()
                self._pages_s = time.monotonic()
            return self._pages

    async def speculation(self, *, max_age_s: float) -> Speculation:
        """Returns how much the engine speculates and why, at most `max_age_s` old."""
        async with self._looking:
            if self._speculation is None or time.monotonic() - self._speculation_s > max_age_s:
                self._speculation = await self.supervisor.speculation()
                self._speculation_s = time.monotonic()
            return self._speculation

    def check_ready(self) -> None:
        why = self.why_not_ready
        if why is not None:
            raise unavailable(f"{why}; try again in a moment")

    def model_name(self, asked: str | None) -> str:
        """Returns the name of the model to answer with; refuses a name that is not served."""
        names = self.model_names
        if asked is None:
            return names[0]
        if asked not in names:
            raise Problem(
                f"the model {asked[:200]!r} is not served here; this server has: {', '.join(names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return asked

    # ---- text --------------------------------------------------------------------------------------

    @property
    def prompt_tokens_max(self) -> int:
        most = self.facts.max_model_len - 1
        return most if self.config.prompt_tokens_max is None else min(most, self.config.prompt_tokens_max)

    async def encode(self, text: str, *, add_special_tokens: bool = True, tokens_max: int | None = None) -> list[int]:
        most = self.prompt_tokens_max if tokens_max is None else tokens_max
        return await self._tokens(Encode(text=text, add_special_tokens=add_special_tokens, tokens_max=most), most)

    async def render(self, order: Render) -> list[int]:
        return await self._tokens(order, order.tokens_max)

    async def _tokens(self, order: TextOrder, most: int) -> list[int]:
        if self._text is None:
            raise unavailable("the model is still loading; try again in a moment")
        try:
            tokens = await self._text.tokens(order)
        except NotNowError as error:
            raise unavailable(str(error)) from None
        except RequestError as error:
            raise Problem(str(error)) from None
        if tokens.count > most:
            raise self.too_long(tokens.count, param="messages" if isinstance(order, Render) else "prompt")
        return tokens.token_ids

    def too_long(self, prompt_tokens: int, max_tokens: int = 1, *, param: str) -> Problem:
        most = self.prompt_tokens_max
        if prompt_tokens > most and most < self.facts.max_model_len - 1:
            said = f"a prompt may have at most {most} tokens here, but this one has {prompt_tokens}"
            excess, remedy = prompt_tokens - most, "shorten the prompt"
        else:
            said = (
                f"this model's context holds {self.facts.max_model_len} tokens, but {prompt_tokens + max_tokens} were "
                f"asked for ({prompt_tokens} in the prompt, {max_tokens} to generate)"
            )
            excess = prompt_tokens + max_tokens - self.facts.max_model_len
            remedy = "shorten the prompt or lower max_tokens" if max_tokens > 1 else "shorten the prompt"
        return Problem(f"{said}: {excess} too many; {remedy}", param=param, code="context_length_exceeded")

    def check_length(self, prompt: Sequence[int], params: SamplingParams, *, param: str) -> None:
        wanted = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
        if len(prompt) > self.prompt_tokens_max or len(prompt) + wanted > self.facts.max_model_len:
            raise self.too_long(len(prompt), wanted, param=param)

    def check_not_empty(self, ids: Sequence[int], param: str) -> None:
        if not ids:
            raise Problem("the prompt is empty; send at least one token", param=param)

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Refuses token ids from a client that the model does not have; those of our own tokenizer need no check."""
        bad = next((token for token in ids if not 0 <= token < self.facts.vocab_size), None)
        if bad is not None:
            raise Problem(
                f"token id {bad} is not in the vocabulary of {self.facts.vocab_size} tokens; use this model's "
                "tokenizer",
                param=param,
                code="invalid_token_id",
            )

    # ---- generation --------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(self, orders: Sequence[Submit]) -> AsyncGenerator[Answers, None]:
        """Inside the context the engine has accepted all orders; leaving it aborts those that still run."""
        self.check_ready()
        wanted = sum(order.params.n for order in orders)
        limit = self.facts.max_num_seqs + self.config.queue_max
        if self.supervisor.requests.num_sequences + wanted > limit:
            raise queue_full(self.supervisor.requests.num_sequences)
        with Job(self.supervisor.requests, orders) as job:
            answers = Answers(job, self.config.request_limit_s)
            await answers.accepted()
            yield answers


class Answers:
    """Reads what arrives for a job, until its time limit."""

    def __init__(self, job: Job, limit_s: float) -> None:
        self._job = job
        self._limit_s = limit_s
        self._deadline_s = asyncio.get_running_loop().time() + limit_s

    async def accepted(self) -> None:
        missing, early = len(self._job.orders), []
        while missing:
            arrival = await self._next()
            if isinstance(arrival.item, Accepted):
                missing -= 1
            else:
                early.append(arrival)
        self._job.put_back(early)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields (index of the order, what it gained) until all orders have ended."""
        while not self._job.finished:
            place, item = await self._next()
            assert isinstance(item, Delta)
            check_ending(item)
            yield place, item

    async def begun(self) -> None:
        """Waits until the first order has yielded something, so that a failure before it has an HTTP status."""
        arrival = await self._next()
        assert isinstance(arrival.item, Delta)
        check_ending(arrival.item)
        self._job.put_back([arrival])

    async def _next(self) -> Arrival:
        try:
            async with asyncio.timeout_at(self._deadline_s):
                arrival = await self._job.next()
        except TimeoutError:
            raise Problem(
                f"the request took longer than {self._limit_s:g} s; ask for fewer tokens",
                status=504,
                type="server_error",
                code="timeout",
            ) from None
        item = arrival.item
        if isinstance(item, Refused):
            if item.is_engine_fault:
                raise Problem(item.message, status=500, type="server_error", code="engine_error")
            if item.is_for_now:
                raise unavailable(item.message)
            # A message about a field begins with its name.
            raise Problem(item.message, param=FIELD if item.message.startswith(FIELD) else None)
        if isinstance(item, Exception):
            raise item
        return arrival


def check_ending(delta: Delta) -> None:
    """Raises a Problem if the delta says that its request has failed."""
    ending = delta.ending
    if ending is None or ending.error is None:
        return
    if not ending.is_engine_fault:
        raise Problem(ending.error)
    if ending.error_code == "kv_transfer_failed":
        raise transfer_failed(ending.error)
    raise Problem(
        f"the engine could not finish this request: {ending.error}",
        status=500,
        type="server_error",
        code="engine_error",
    )
