"""What the sampler keeps of a request from step to step, and one row of it to sample."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.kernels.portable import fork_seed
from outrider.sampling import SamplingParams


class RequestSampling:
    """One continuation of a request. A new token costs the same however many there are.

    `seed` overrides the one in `params`: whoever resumes a request elsewhere passes the seed it had. `output`
    are tokens that count as generated already; they are not part of `prompt`.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        device: torch.device | str,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        eos_token_ids: Iterable[int] = (),
        fork: int = 0,
        seed: int | None = None,
    ) -> None:
        params.check_vocabulary(vocab_size)
        self.params = params
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        if seed is None:
            seed = params.seed if params.seed is not None else secrets.randbits(64) - (1 << 63)
        self.request_seed = seed
        """Of the request, shared by its forks."""
        self.seed = fork_seed(seed, fork)
        self.generated = 0
        self.greedy = params.greedy
        self.suppressed = tuple(sorted({*eos_token_ids, *params.stop_tokens}))
        """Impossible until min_tokens is reached, even where ignore_eos makes end-of-text an ordinary token."""
        self.min_tokens = params.min_tokens if self.suppressed else 0
        self.bias = tuple((params.logit_bias or {}).items())
        self.allowed: Tensor | None = None
        if params.allowed_token_ids is not None:
            self.allowed = self._marked(params.allowed_token_ids)
        self.seen: Tensor | None = None
        """bool [vocab]: the token is in the prompt or the output. Only for repetition_penalty."""
        if params.repetition_penalty != 1.0:
            self.seen = self._marked(prompt)
        self.counts: Tensor | None = None
        """float32 [vocab]: how often the token is in the output. Only for the other two penalties."""
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=self.device)
        self.penalised = self.seen is not None or self.counts is not None
        self.edits = self.penalised or self.allowed is not None or bool(self.bias)
        """Are the logits changed at every row?"""
        self.append(output)

    def append(self, tokens: Sequence[int]) -> None:
        """These tokens were committed."""
        self.generated += len(tokens)
        for token in tokens if self.penalised else ():
            if self.seen is not None:
                self.seen[token] = True
            if self.counts is not None:
                self.counts[token] += 1.0

    def fork(self, number: int) -> RequestSampling:
        """Another continuation that shares what was committed so far, with noise of its own."""
        twin = object.__new__(RequestSampling)
        twin.__dict__.update(self.__dict__)
        twin.seed = fork_seed(self.request_seed, number)
        twin.seen = None if self.seen is None else self.seen.clone()
        twin.counts = None if self.counts is None else self.counts.clone()
        return twin

    def _marked(self, tokens: Sequence[int]) -> Tensor:
        # Checked here because an index out of range ends the whole process on CUDA.
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            raise RequestError(f"every token id must be from 0 to {self.vocab_size - 1}, the model's vocabulary")
        marked = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        marked[torch.tensor(tokens, dtype=torch.int64, device=self.device)] = True
        return marked


class SampleRow(NamedTuple):
    """One distribution to sample from."""

    state: RequestSampling
    position: int
    """Of the token being sampled."""
    assumed: tuple[int, ...] = ()
    """Drafts between the committed tokens and this row."""
    mask: Tensor | None = None
    """bool [vocab]: the tokens that may be chosen."""

    @property
    def suppresses(self) -> bool:
        return self.state.generated + len(self.assumed) < self.state.min_tokens

    @property
    def edited(self) -> bool:
        """Does anything change the logits before temperature?"""
        return self.state.edits or self.mask is not None or self.suppresses
