"""The contestants of `outrider bench decode`, and the result of one run of each."""

from __future__ import annotations

import importlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.backends.torch_threads import torch_threads
from outrider.config import SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams

PADDING = 0
"""Token id in front of shorter prompts; the attention mask hides it, so any id serves."""


PASSES = ("target", "draft", "feed")
"""Passes whose costs an engine learns by their rows: of the target, of proposing, and of feeding the drafter."""


class Run(NamedTuple):
    """Result of one run of one contestant."""

    prompt_s: float
    """Time until every request has its first token."""
    decode_s: float
    """Time from then until the first request ends: as long as the batch is whole. With drafts, requests end at
    different steps, and what fewer requests generate per second says nothing of the batch."""
    decoded_tokens: int
    """Tokens of all requests in that time."""
    whole_s: float
    """Time from the first tokens to the last token of all."""
    steps_s: list[float]
    """Durations of the decoding steps; steps that compute prompts are left out."""
    tokens: list[list[int]]
    tokens_per_step: float
    """Tokens that each request gains per step; 1 without speculation."""
    acceptance_length: float | None
    """Mean over the steps that verified drafts; None if no step did, or if the contestant does not count them."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of decoding with the whole batch, prompts left out."""
        return self.decoded_tokens / self.decode_s

    @property
    def whole_tokens_per_s(self) -> float:
        """Tokens per second of decoding until the last request ends, prompts left out."""
        return (sum(map(len, self.tokens)) - len(self.tokens)) / self.whole_s


class Contestant(ABC):
    name: str

    def takes(self, batch: int) -> bool:
        return True

    @abstractmethod
    def run(self, prompts: Sequence[list[int]], tokens: int) -> Run: ...


class OutriderContestant(Contestant):
    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        speculate: bool,
        drafts: int | None = None,
        chooses: bool = False,
        method: str | None = None,
    ) -> None:
        self.name = name
        self.engine = engine
        self.drafts = drafts
        """Number of drafts that every request asks for; None leaves it to the engine."""
        self.chooses = chooses
        """Whether the engine chooses at each step how much is drafted."""
        self.method = method
        """How the engine drafts; None if it does not."""
        self._speculate = speculate

    @property
    def draft_kv_ratio(self) -> float:
        """Bytes of the drafter's KV for each byte of the target's."""
        groups, targets = self.engine.scheduler.kv.layout.groups, self.engine.scheduler.kv.layout.num_target
        sizes = [group.slot_bytes for group in groups]
        return sum(sizes[targets:]) / sum(sizes[:targets])

    @property
    def cost_curves(self) -> dict[str, list[list[float]]] | None:
        """What the engine has learnt of the seconds that passes take, as [rows, seconds]; None if it does not learn."""
        if self.engine.pacer is None:
            return None
        costs = self.engine.pacer.costs
        return {
            name: [[rows, seconds * costs.speed] for rows, seconds in costs.curves[name].observed] for name in PASSES
        }

    def run(self, prompts: Sequence[list[int]], tokens: int) -> Run:
        engine = self.engine
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        drafts, accepted = engine.speculation.drafts, engine.speculation.accepted_tokens
        # Rounds repeat their prompts: without a salt of its own, a run could copy its texts from an earlier one.
        salt = secrets.token_hex(8)
        steps: list[float] = []
        prompt_s, early_tokens = 0.0, 0
        first_end_s, decoded_tokens = 0.0, 0
        started = before = perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(
                str(number),
                prompt,
                params,
                salt=salt,
                speculate=self._speculate,
                num_speculative_tokens=self.drafts,
            )
        outputs = [engine.output(str(number)) for number in range(len(prompts))]
        while engine.has_work:
            engine.step()
            now = perf_counter()
            if prompt_s:
                steps.append(now - before)
                if not first_end_s and any(output.finished for output in outputs):
                    first_end_s = now
                    decoded_tokens = sum(len(output.outputs[0].token_ids) for output in outputs) - early_tokens
            elif all(output.outputs[0].token_ids for output in outputs):
                prompt_s = now - started
                # Where prompts take several steps, the first requests decode while others wait.
                early_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            before = now
        drafts, accepted = engine.speculation.drafts - drafts, engine.speculation.accepted_tokens - accepted
        return Run(
            prompt_s=prompt_s,
            decode_s=first_end_s - started - prompt_s,
            decoded_tokens=decoded_tokens,
            whole_s=before - started - prompt_s,
            steps_s=steps,
            tokens=[output.outputs[0].token_ids for output in outputs],
            tokens_per_step=len(prompts) * tokens / sum(output.metrics.steps for output in outputs),
            acceptance_length=1 + accepted / drafts if drafts else None,
        )


class TransformersContestant(Contestant):
    def __init__(self, name: str, reference: Any, threads: int, *, lookup: SpeculativeConfig | None = None) -> None:
        self.name = name
        self._reference = reference
        self._threads = threads
        self._lookup = lookup

    def takes(self, batch: int) -> bool:
        # Prompt lookup in Transformers takes one text at a time.
        return self._lookup is None or batch == 1

    def run(self, prompts: Sequence[list[int]], tokens: int) -> Run:
        generation: Any = importlib.import_module("transformers").GenerationConfig
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": None}
        if self._lookup is not None:
            settings["prompt_lookup_num_tokens"] = self._lookup.num_speculative_tokens
            settings["max_matching_ngram_size"] = self._lookup.prompt_lookup_max
        config = generation(pad_token_id=PADDING, **settings)
        ids, attended = left_padded(prompts, self._reference.device)
        clock = StepClock()
        with torch.inference_mode(), torch_threads(self._threads):
            started = perf_counter()
            output = self._reference.generate(ids, attention_mask=attended, generation_config=config, streamer=clock)
            texts = output[:, ids.shape[1] :].tolist()
            seconds = perf_counter() - started
        # The first call hands over the prompt, the second the first token.
        times = clock.times[1:]
        return Run(
            prompt_s=times[0] - started,
            decode_s=seconds - (times[0] - started),
            whole_s=seconds - (times[0] - started),
            decoded_tokens=len(prompts) * (tokens - 1),
            steps_s=[later - earlier for earlier, later in pairwise(times)],
            tokens=texts,
            tokens_per_step=tokens / len(times),
            acceptance_length=None,
        )


def left_padded(prompts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the prompts as one batch that ends at the same column, and the mask of the tokens that are no padding.

    Chats of one batch have different lengths, and Transformers continues every row from the last column.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


class StepClock:
    """A streamer that Transformers calls with each step's tokens, to note the time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass
