"""What the sampler keeps of a request from step to step, and one row of it to sample."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.backends.keyed_noise import fork_seed
from outrider.sampling import SamplingParams
from outrider.structured.matcher import Matcher


class TokenCounts:
    """Different tokens, and how often each is in the output: arrays that grow, so that a step need not rebuild them."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._tokens: NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._counts: NDArray[np.float32] = np.zeros(64, dtype=np.float32)

    def add(self, tokens: Iterable[int], times: float) -> None:
        """`times` 0: only note that they are there."""
        for token in tokens:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._tokens[slot] = token
            self._counts[slot] += times

    def after(self, assumed: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and counts as they would be with the assumed tokens in the output. Not to be kept or changed."""
        end = len(self._slots)
        tokens, counts = self._tokens[:end], self._counts[:end]
        if assumed:
            new = [token for token in dict.fromkeys(assumed) if token not in self._slots]
            tokens = np.concatenate([tokens, np.array(new, dtype=np.int64)])
            counts = np.concatenate([counts, np.zeros(len(new), dtype=np.float32)])
            for token in assumed:
                counts[self._slots[token] if token in self._slots else end + new.index(token)] += 1.0
        return tokens, counts

    def copy(self) -> TokenCounts:
        twin = TokenCounts()
        twin._slots = dict(self._slots)
        twin._tokens, twin._counts = self._tokens.copy(), self._counts.copy()
        return twin


class RequestSampling:
    """One continuation of a request. A new token costs the same however many there are.

    `seed` overrides the one in `params`, so that a request can be resumed elsewhere with the seed it had. `output` are
    tokens that count as generated already; they are not part of `prompt`.
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
        matcher: Matcher | None = None,
    ) -> None:
        params.check_vocabulary(vocab_size)
        self.params = params
        if seed is None:
            seed = params.seed if params.seed is not None else secrets.randbits(64) - (1 << 63)
        self.request_seed = seed
        """The request's own seed, which its forks share."""
        self.seed = fork_seed(seed, fork)
        self.generated = 0
        self.greedy = params.greedy
        self.suppressed = tuple(sorted({*params.stop_tokens, *(eos for eos in eos_token_ids if eos < vocab_size)}))
        """Impossible until min_tokens is reached, even where ignore_eos makes end-of-text an ordinary token."""
        self.min_tokens = params.min_tokens if self.suppressed else 0
        self.bias = tuple((params.logit_bias or {}).items())
        self.allowed: Tensor | None = None
        """bool [vocab]"""
        if params.allowed_token_ids is not None:
            self.allowed = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.allowed[torch.tensor(params.allowed_token_ids, device=device)] = True
        self.matcher = matcher
        """The state of this continuation in its grammar, where it has one."""
        self.history: TokenCounts | None = None
        if params.penalises:
            self.history = TokenCounts()
            if params.repetition_penalty != 1.0:  # the other two do not look at the prompt
                self.history.add(prompt, 0.0)
        self.edits = self.history is not None or self.allowed is not None or bool(self.bias)
        """Are the logits changed at every row?"""
        self.plain = self.greedy and not (self.edits or matcher or self.min_tokens or params.logprobs is not None)
        """Is the largest logit all that counts, at every row?"""
        self.append(output)

    def append(self, tokens: Sequence[int]) -> None:
        """Notes that these tokens were committed."""
        self.generated += len(tokens)
        if self.matcher is not None:
            self.matcher.accept(tokens)
        if self.history is not None:
            self.history.add(tokens, 1.0)

    def adopt_seed(self, seed: int) -> None:
        """Draw from now on as the worker does that drew this request's first token."""
        if self.params.seed is None:
            self.request_seed = seed
            self.seed = fork_seed(seed, 0)

    def fork(self, number: int) -> RequestSampling:
        """Another continuation that shares what was committed so far, with noise of its own."""
        twin = object.__new__(RequestSampling)
        twin.__dict__.update(self.__dict__)
        twin.seed = fork_seed(self.request_seed, number)
        twin.history = None if self.history is None else self.history.copy()
        twin.matcher = None if self.matcher is None else self.matcher.fork()
        return twin

    def rows(self, position: int, assumed: tuple[int, ...] = ()) -> list[SampleRow]:
        """The row at `position`, which assumes nothing, and the rows after each of the assumed tokens."""
        masks = [None] * (len(assumed) + 1) if self.matcher is None else self.matcher.masks(assumed)
        return [SampleRow(self, position + number, assumed[:number], mask) for number, mask in enumerate(masks)]

    def row_after(self, position: int, assumed: tuple[int, ...]) -> SampleRow:
        """Only the row at `position`, which assumes all of the tokens."""
        mask = None if self.matcher is None else self.matcher.mask_after(assumed)
        return SampleRow(self, position, assumed, mask)


class SampleRow(NamedTuple):
    """One distribution to sample from."""

    state: RequestSampling
    position: int
    """Position of the token that is sampled."""
    assumed: tuple[int, ...] = ()
    """Drafts between the committed tokens and this row."""
    mask: Tensor | None = None
    """bool [vocab]: the tokens that may be chosen."""

    @property
    def suppresses(self) -> bool:
        state = self.state
        if state.generated + len(self.assumed) >= state.min_tokens:
            return False
        # A text that has its form and cannot go on ends, however short.
        return self.mask is None or int(self.mask.sum()) > int(self.mask[list(state.suppressed)].sum())

    @property
    def edited(self) -> bool:
        """Does anything change the logits before temperature?"""
        return self.state.edits or self.mask is not None or self.suppresses
