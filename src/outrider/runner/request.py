"""What the runner keeps of a request: its own copy of the tokens, its sampling state, its drafts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.runner.sampler import RequestSampling


class RunningRequest:
    __slots__ = (
        "_worth_asking",
        "drafts",
        "forks",
        "id",
        "line",
        "prompt_len",
        "prompt_logprobs",
        "sampling",
        "stop_tokens",
        "together",
        "tokens",
    )

    def __init__(
        self,
        id: str,
        tokens: Sequence[int],
        sampling: RequestSampling,
        *,
        prompt_len: int,
        stop_tokens: frozenset[int] = frozenset(),
        forks: tuple[RequestSampling, ...] = (),
        prompt_logprobs: int | None = None,
    ) -> None:
        self.id = id
        self.tokens = array("I", tokens)
        """Committed tokens, the last sampled one included."""
        self.sampling = sampling
        self.prompt_len = prompt_len
        self.stop_tokens = stop_tokens
        self.forks = forks
        """Sampling of the further continuations, which draw their first token beside this one's."""
        self.prompt_logprobs = prompt_logprobs
        self.drafts: list[int] = []
        """Proposed in the last step, to be verified in the next."""
        self.together: list[float] = []
        """For each draft so far, how likely it and all before it are right; empty where nobody knows."""
        self.line = -1
        """Its line in the page tables."""
        self._worth_asking: int | None = None
        """How many drafts to ask for next; None: as many as may be."""

    @property
    def draws_depend(self) -> bool:
        """Does what may be drawn at a position depend on the drafts before it (penalties, a least length, a form)?"""
        sampling = self.sampling
        if sampling.history is not None or sampling.matcher is not None:
            return True
        return sampling.generated < sampling.min_tokens

    def take(self, tokens: Sequence[int]) -> None:
        """These tokens are committed."""
        self.tokens.extend(tokens)
        self.sampling.append(tokens)

    # ---- drafts --------------------------------------------------------------------------------------

    def begin_drafting(self) -> None:
        self.drafts, self.together = [], []

    def worth_asking(self, k: int) -> int:
        """How many of at most `k` drafts are likely to count: a block of them is paid for whether they do or not."""
        return k if self._worth_asking is None else min(k, self._worth_asking)

    def drafted(self, share: float) -> None:
        """The next draft is right with this probability if those before it are."""
        self.together.append(self.confidence * share)

    @property
    def confidence(self) -> float:
        return self.together[-1] if self.together else 1.0

    def propose(self, drafts: list[int], least_confidence: float) -> None:
        """Have them verified, as far as they are likely enough."""
        if self.together and least_confidence:
            # Confidence only falls, so the likely ones come first.
            asked, likely = len(self.together), sum(together >= least_confidence for together in self.together)
            drafts = drafts[:likely]
            # A text is about as easy to foresee as it was a moment ago.
            self._worth_asking = likely + 1 if likely < asked else 2 * asked + 1
        if self.sampling.matcher is not None:
            # Found in a text, or drawn from a vocabulary without any token that the grammar allows here.
            drafts = drafts[: self.sampling.matcher.count_allowed(drafts)]
        self.drafts = drafts
