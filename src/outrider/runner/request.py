"""What the runner keeps of a sequence beside its record: the state of sampling, and drafts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

from outrider.runner.sampler import RequestSampling
from outrider.scheduler.request import Request


class RunningRequest:
    __slots__ = (
        "_worth_asking",
        "drafts",
        "forced",
        "forks",
        "id",
        "joint_probabilities",
        "probabilities",
        "prompt_logprobs",
        "record",
        "salt",
        "sampling",
        "table_row",
        "tokens",
    )

    def __init__(
        self,
        record: Request,
        sampling: RequestSampling,
        *,
        forks: tuple[RequestSampling, ...] = (),
        prompt_logprobs: int | None = None,
    ) -> None:
        self.record = record
        self.id = record.id
        self.salt = record.spec.salt
        self.tokens = record.tokens
        """The record's own array. While a step runs, the tokens that it sampled are at the end: see `extend`."""
        self.sampling = sampling
        self.forks = forks
        """Sampling of the other continuations, which draw their first token from the same row as this one."""
        self.prompt_logprobs = prompt_logprobs
        self.drafts: list[int] = []
        """Drafts proposed in the last step, to be verified in the next."""
        self.forced: list[int] = []
        """The next tokens that the grammar dictates, as far as drafts are wanted: drafts that are certain."""
        self.joint_probabilities: list[float] = []
        """For each draft so far, the probability that it and all before it are accepted; empty where the drafter
        gives none."""
        self.probabilities: list[float] = []
        """For each draft so far, the drafter's probability that it is accepted if all before it are."""
        self.table_row = -1
        """The sequence's row in the block tables."""
        self._worth_asking: int | None = None
        """How many drafts to ask for next; None for as many as may be."""

    @property
    def draws_depend(self) -> bool:
        """Whether what may be drawn at a position depends on the drafts before it (penalties, a least length, a
        grammar)."""
        sampling = self.sampling
        if sampling.history is not None or sampling.matcher is not None:
            return True
        return sampling.generated < sampling.min_tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Add what the target sampled, so that the drafter can be fed with it.

        Only a commit makes tokens the request's: `retract` takes them back when the drafter has run.
        """
        self.tokens.extend(tokens)
        self.sampling.append(tokens)

    def retract(self, known: int) -> None:
        """Leave only the tokens that were committed before the step."""
        del self.tokens[known:]

    # ---- drafts --------------------------------------------------------------------------------------

    def begin_drafting(self, k: int = 0) -> None:
        """Forgets the last drafts; at most `k` new ones are wanted."""
        self.drafts, self.joint_probabilities, self.probabilities = [], [], []
        matcher = self.sampling.matcher
        self.forced = [] if matcher is None else matcher.forced(k)

    @property
    def next_drafts_worth_asking(self) -> int | None:
        """How many drafts to ask for next; None for as many as may be."""
        return self._worth_asking

    def adopt_drafts(self, drafts: Sequence[int], worth_asking: int | None) -> None:
        """Have drafts of the worker verified that computed the prompt, and ask for as many as it would have."""
        self.drafts, self._worth_asking = list(drafts), worth_asking

    def worth_asking(self, k: int) -> int:
        """Returns how many of at most `k` drafts are likely to be accepted: a block costs the same either way."""
        return k if self._worth_asking is None else min(k, self._worth_asking + len(self.forced))

    def dictated(self, place: int) -> int | None:
        """Returns the token that the grammar dictates as the draft with this number, or None if it leaves a choice."""
        return self.forced[place] if place < len(self.forced) else None

    def drafted(self, probability: float, corrected: float) -> None:
        """Note the probability of the next draft, given that those before it are accepted: by the drafter, and
        corrected by what was accepted so far."""
        self.probabilities.append(probability)
        self.joint_probabilities.append(self.confidence * corrected)

    def allowed(self, drafts: list[int]) -> list[int]:
        """Returns the drafts up to the first that the request's grammar forbids."""
        matcher = self.sampling.matcher
        return drafts if matcher is None else drafts[: matcher.count_allowed(drafts)]

    @property
    def confidence(self) -> float:
        """The probability that all drafts so far are accepted."""
        return self.joint_probabilities[-1] if self.joint_probabilities else 1.0

    def propose(self, drafts: list[int], least_confidence: float, probabilities: Sequence[float] | None = None) -> None:
        """Has these drafts verified, as far as they are likely enough. `probabilities` are the drafter's own estimates;
        without them the probabilities of the logits that were drawn from count."""
        if probabilities is not None:
            self.joint_probabilities = list(accumulate(probabilities, operator.mul))
        if self.joint_probabilities and least_confidence:
            # Confidence only falls, so the likely ones come first.
            asked = len(self.joint_probabilities)
            likely = sum(probability >= least_confidence for probability in self.joint_probabilities)
            drafts = drafts[:likely]
            # The next tokens are usually about as predictable as the last ones were, apart from those that the grammar
            # dictates.
            asked, likely = asked - len(self.forced), likely - len(self.forced)
            self._worth_asking = likely + 1 if likely < asked else 2 * asked + 1
        # A look-up, or a vocabulary without any token that the grammar allows here, may propose forbidden tokens.
        drafts = self.allowed(drafts)
        # A drafter that looks its drafts up does not know what the grammar dictates.
        self.drafts = drafts if drafts[: len(self.forced)] == self.forced else self.forced
