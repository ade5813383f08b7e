"""The state of one continuation in its grammar: which tokens may come next, also after drafts yet to be verified.

committed tokens        accepted for good
drafts d1 d2 …          accepted to see what may follow each of them, then rolled back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher

DEAD_END = "NoExtensionBias"
"""llguidance's error for a grammar that can neither continue nor end."""


class Matcher:
    """`native` is at the beginning of the grammar, and `start` makes another one there."""

    def __init__(
        self,
        native: LLMatcher,
        start: Callable[[], LLMatcher],
        *,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._start = start
        self._native = native
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._device = device
        self._accepted: list[int] = []
        self._ended = False
        """Whether an end-of-text token, or a token outside the grammar, has been committed."""
        self.problem: str | None = None
        """The reason why no token is allowed at some row, where the grammar itself is the reason."""

    def fork(self) -> Matcher:
        twin = object.__new__(Matcher)
        twin.__dict__.update(self.__dict__)
        twin._native = self._native.deep_copy()
        twin._accepted = list(self._accepted)
        return twin

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes over committed tokens. A request's last tokens may lie outside its grammar: those of a step that
        ends the request with an error, or that were verified after an end-of-text token."""
        for token in tokens:
            if token in self._eos_ids or self._ended or not self._advance(token):
                self._ended = True
                return
            self._accepted.append(token)

    def masks(self, drafts: Sequence[int]) -> list[Tensor | None]:
        """Returns the allowed tokens, bool [vocab], after none of the drafts, after the first, … and after all.

        The entries are None from the first draft on that the grammar does not allow, and after an end of text.
        """
        self.problem = None
        masks: list[Tensor | None] = [None if self._ended else self._mask()]
        self._follow(drafts, lambda: masks.append(self._mask()))
        return masks + [None] * (len(drafts) + 1 - len(masks))

    def mask_after(self, drafts: Sequence[int]) -> Tensor | None:
        """Returns the last entry of `masks(drafts)`."""
        found: list[Tensor] = []
        if not drafts:
            return None if self._ended else self._mask()
        self._follow(drafts, lambda: None, at_end=lambda: found.append(self._mask()))
        return found[0] if found else None

    def count_allowed(self, drafts: Sequence[int]) -> int:
        """Returns how many of the drafts, from the first on, the grammar allows one after the other."""
        return self._follow(drafts, lambda: None)

    def forced(self, limit: int) -> list[int]:
        """Returns the next tokens, at most `limit`, as far as the grammar leaves exactly one choice for each."""
        if self._ended or limit < 1:
            return []
        tokens = list(self._native.compute_ff_tokens()[:limit])
        self._recover()
        return tokens

    def _follow(
        self, drafts: Sequence[int], each: Callable[[], None], *, at_end: Callable[[], None] | None = None
    ) -> int:
        """Walks along the drafts as far as the grammar allows, calls `each` after every draft that text may follow
        and `at_end` if text may follow all of them, and walks back. Returns the number of drafts allowed."""
        if self._ended:
            return 0
        advanced, ends = 0, False
        for draft in drafts:
            if draft in self._eos_ids:
                # llguidance takes no end-of-text token where the grammar cannot continue.
                ends = self._native.is_accepting()
                break
            if not self._advance(draft):
                break
            advanced += 1
            each()
        else:
            if at_end is not None:
                at_end()
        if not self._native.is_error():
            self._native.rollback(advanced)
        self._recover()
        return advanced + ends

    def _advance(self, token: int) -> bool:
        return self._native.try_consume_tokens([token]) == 1

    def _mask(self) -> Tensor:
        bits = np.frombuffer(self._native.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        if self._native.is_error():
            # llguidance would end the text here, whether or not it is complete.
            error = self._native.get_error().splitlines()[0]
            self.problem = (
                "the grammar allows nothing here, not even the end of the text; correct it"
                if error.startswith(DEAD_END)
                else f"the grammar is too complex to follow ({error}); make it simpler"
            )
            allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        return torch.from_numpy(allowed).to(self._device)

    def _recover(self) -> None:
        """Starts again at the committed tokens if an error ended the native matcher, which nothing else undoes:
        drafts may be rejected, and must not decide whether their request fails."""
        if self._native.is_error():
            self._native = self._start()
            self._native.try_consume_tokens(self._accepted)
