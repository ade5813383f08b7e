"""`LLM`: the engine for use from Python, one call at a time."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Generator, Mapping, Sequence
from numbers import Integral, Number
from typing import Any, cast
from uuid import uuid4

import numpy as np

from outrider.config import EngineConfig, KVStoreConfig, KVTransferConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from outrider.engine.step_costs import know_costs
from outrider.errors import RequestError
from outrider.events.config import KVEventsConfig
from outrider.models.resolve import DEFAULT_MODEL
from outrider.sampling import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}."""
Message = Mapping[str, Any]


def new_request_id() -> str:
    """Returns an id for a request whose caller chose none; no other request has it, whatever ids callers choose."""
    return uuid4().hex


class LLM:
    """A model, ready to generate.

    >>> llm = LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 5})
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        kv_store_config: KVStoreConfig | Mapping[str, Any] | None = None,
        kv_transfer_config: KVTransferConfig | Mapping[str, Any] | None = None,
        kv_events_config: KVEventsConfig | Mapping[str, Any] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are fields of EngineConfig. `progress` is called with (what, done, total) while loading."""
        config = EngineConfig(
            model=model,
            speculative_config=SpeculativeConfig.of(speculative_config),
            kv_store_config=KVStoreConfig.of(kv_store_config),
            kv_transfer_config=KVTransferConfig.of(kv_transfer_config),
            kv_events_config=KVEventsConfig.of(kv_events_config),
            **settings,
        )
        self.engine = build_engine(config, progress=progress)
        know_costs(self.engine, progress)

    @classmethod
    def over(cls, engine: Engine) -> LLM:
        """Use an engine that is built already."""
        llm = cls.__new__(cls)
        llm.engine = engine
        return llm

    # ---- whole answers -----------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[Sequence[RequestOutput]], None] | None = None,
        speculate: bool = True,
        num_speculative_tokens: int | None = None,
        hand_over: bool = False,
        ticket: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; results come in the order of the prompts.

        A prompt that cannot be served raises if it came alone. In a list it gets a result with `error` set, and all
        others are served. Without `speculate` nothing is drafted; `num_speculative_tokens` fixes how many tokens are
        drafted at each step, where the engine would choose. The text is the same either way. With a
        `kv_transfer_config`, `hand_over` computes only the prompts, and each result has a `ticket`: another engine that
        is given it (one for each prompt) starts from their KV.
        """
        given, alone = _prompts_of(prompts)
        params = self._params_for(sampling_params, len(given))
        tickets = [ticket] * len(given) if ticket is None or isinstance(ticket, str) else list(ticket)
        if len(tickets) != len(given) or (isinstance(ticket, str) and not alone):
            raise RequestError(f"{len(given)} prompts, but another number of tickets; each prompt has its own ticket")
        options: dict[str, Any] = {
            "speculate": speculate,
            "num_speculative_tokens": num_speculative_tokens,
            "hand_over": hand_over,
        }
        names: list[str] = []
        results: dict[str, RequestOutput] = {}
        try:
            for prompt, wanted, prompt_ticket in zip(given, params, tickets, strict=True):
                name = new_request_id()
                names.append(name)
                try:
                    self._add(name, prompt, wanted, **options, ticket=prompt_ticket)
                    results[name] = self.engine.output(name)
                except RequestError as error:
                    if alone:
                        raise
                    results[name] = refused(name, str(error))
            while not all(output.finished for output in results.values()):
                changed = self._step()
                if on_step is not None:
                    on_step(changed)
        finally:
            # An interrupted call leaves nothing running.
            for name in names:
                if name not in results or not results[name].finished:
                    self.engine.abort_soon(name)
        return list(results.values())

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several. `options` are those of `generate`."""
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise RequestError(
                f"a conversation is a list of messages like {{'role': 'user', 'content': text}}, got "
                f"{type(messages).__name__}"
            )
        alone = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = [messages] if alone else list(messages)
        prompts = [self.chat_prompt(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts[0] if alone else prompts, sampling_params, **options)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of a conversation up to where the assistant speaks next."""
        template = self.engine.model.chat_template
        if template is None:
            raise RequestError(
                f"{self.engine.model.name} has no chat template, so it is not made for conversations; use generate"
            )
        text = template.render(messages, add_generation_prompt=True)
        return self.engine.model.tokenizer.encode(text, add_special_tokens=False)

    # ---- streams -----------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        num_speculative_tokens: int | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt; yields the growing result after every step that adds to it. Closing the generator early
        aborts the request. `speculate` and `num_speculative_tokens` are as for `generate`."""
        name, output, ended = new_request_id(), None, False
        try:
            params = SamplingParams() if sampling_params is None else sampling_params
            self._add(name, prompt, params, speculate=speculate, num_speculative_tokens=num_speculative_tokens)
            output = self.engine.output(name)
            while not ended:
                # Another call may have brought it to its end meanwhile.
                if output.finished or output in self._step():
                    ended = output.finished
                    yield output
        finally:
            if output is None or not output.finished:
                self.engine.abort_soon(name)

    # ---- helpers -----------------------------------------------------------------------------------

    def _add(self, name: str, prompt: Prompt, params: SamplingParams, **options: Any) -> None:
        text, ids = self.encode(prompt)
        self.engine.add_request(name, ids, params, prompt=text, **options)

    def _step(self) -> list[RequestOutput]:
        """Run a step; sleeps first if there is nothing to do before another engine's KV arrives."""
        if self.engine.waits:
            self.engine.wait()
        return self.engine.step()

    def close(self) -> None:
        """End the connections to other engines, if there are any."""
        self.engine.close()

    def encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """Returns a prompt's text, where it has one, and its token ids, which the engine checks."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), cast("Sequence[int]", _plain(prompt["prompt_token_ids"]))
            if "prompt" not in prompt:
                raise RequestError("a prompt given as a mapping needs 'prompt' or 'prompt_token_ids'")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.engine.model.tokenizer.encode(prompt)
        return None, cast("Sequence[int]", _plain(prompt))

    @staticmethod
    def _params_for(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [SamplingParams() if given is None else given] * count
        listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        if not listed or not all(isinstance(item, SamplingParams) for item in given):
            raise RequestError(
                f"sampling_params must be SamplingParams, or a list of them, got {reprlib.repr(given)}; "
                "write SamplingParams(temperature=0, max_tokens=32)"
            )
        if len(given) != count:
            raise RequestError(f"{count} prompts but {len(given)} sampling_params; send one for all or one for each")
        return list(given)


def _plain(value: object) -> object:
    """Returns NumPy's whole numbers as Python's, and everything else as it is."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        return value.tolist()
    return value


def _prompts_of(given: object) -> tuple[list[Prompt], bool]:
    """Returns the prompts, and whether it was one alone. Whether each can be served is checked later."""
    given = _plain(given)
    if isinstance(given, str | Mapping):
        return [cast("Prompt", given)], True
    if isinstance(given, bytes | bytearray) or not isinstance(given, Sequence):
        raise RequestError(
            "a prompt is text, a list of token ids, or {'prompt': text}; several prompts come in a list; "
            f"got {type(given).__name__}"
        )
    first = given[0] if given else None
    if isinstance(first, Integral):
        return [cast("Prompt", given)], True
    if isinstance(first, Number):
        raise RequestError(
            f"a list of whole numbers is one prompt of token ids, but this one holds {first!r}, a "
            f"{type(first).__name__}; token ids are whole numbers"
        )
    return list(given), False


def refused(request_id: str, error: str) -> RequestOutput:
    """Returns the result of a request that was refused."""
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        outputs=[CompletionOutput(index=0, finish_reason="error")],
        metrics=RequestMetrics(arrival_s=0.0),
        finished=True,
        error=error,
        error_is_callers=True,
    )
