"""One text's way through its grammar: which tokens may come next, also after drafts that nobody has verified.

committed tokens        accepted for good
drafts d1 d2 …          accepted to see what may follow each, then taken back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class GrammarState(Protocol):
    """What follows a grammar token by token."""

    def accept_token(self, token_id: int) -> bool:
        """False, and nothing changes, if the grammar does not allow it here."""

    def rollback(self, num_tokens: int) -> None: ...

    def is_terminated(self) -> bool:
        """Has end-of-text been accepted?"""

    def fill_next_token_bitmask(self, bitmask: Tensor) -> bool:
        """int32 [1, vocab / 32]: bit t % 32 of word t / 32 is set where token t may come next."""

    def fork(self) -> GrammarState: ...


class Matcher:
    def __init__(self, state: GrammarState, *, vocab_size: int, device: torch.device) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self._device = device
        self._bitmask = torch.zeros((1, (vocab_size + 31) // 32), dtype=torch.int32)
        self._left = False
        """A committed token was none of the grammar's: its request has ended, or ends with this step."""

    @classmethod
    def of(cls, compiled: Any, *, vocab_size: int, device: torch.device) -> Matcher:
        import xgrammar

        return cls(xgrammar.GrammarMatcher(compiled), vocab_size=vocab_size, device=device)

    def fork(self) -> Matcher:
        twin = Matcher(self._state.fork(), vocab_size=self._vocab_size, device=self._device)
        twin._left = self._left
        return twin

    def accept(self, tokens: Sequence[int]) -> None:
        """These tokens were committed."""
        for token in tokens:
            # Drafts that were verified beside an end-of-text come after it, and count for nothing.
            self._left = self._left or not self._advance(token)

    def masks(self, drafts: Sequence[int]) -> list[Tensor | None]:
        """bool [vocab] after none of the drafts, after the first, … after all; None where no text can be."""
        masks: list[Tensor | None] = [self._mask()]
        allowed = 0
        try:
            for draft in drafts:
                if not self._follow(draft):
                    break
                allowed += 1
                masks.append(self._mask())
        finally:
            self._state.rollback(allowed)
        return masks + [None] * (len(drafts) + 1 - len(masks))

    def mask_after(self, drafts: Sequence[int]) -> Tensor | None:
        allowed = 0
        try:
            while allowed < len(drafts) and self._follow(drafts[allowed]):
                allowed += 1
            return self._mask() if allowed == len(drafts) else None
        finally:
            self._state.rollback(allowed)

    def count_allowed(self, drafts: Sequence[int]) -> int:
        """How many of the drafts, from the first on, the grammar allows one after the other."""
        allowed = 0
        while allowed < len(drafts) and self._follow(drafts[allowed]):
            allowed += 1
        self._state.rollback(allowed)
        return allowed

    def _follow(self, token: int) -> bool:
        return not self._left and self._advance(token)

    def _advance(self, token: int) -> bool:
        return not self._state.is_terminated() and self._state.accept_token(token)

    def _mask(self) -> Tensor | None:
        if self._left or self._state.is_terminated():
            return None
        self._state.fill_next_token_bitmask(self._bitmask)
        bits = np.unpackbits(self._bitmask.numpy().view(np.uint8), bitorder="little")[: self._vocab_size]
        return torch.from_numpy(bits.view(np.bool_)).to(self._device)
