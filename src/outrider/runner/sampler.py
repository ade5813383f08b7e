"""The sampler: it chooses tokens from logits and the requests' settings, as a pure function of each row.

The order of the settings is vLLM's:

    mask, allowed_token_ids      all other tokens become impossible
    min_tokens                   until reached, end-of-text and stop tokens become impossible
    logit_bias                   added
    repetition_penalty           tokens of prompt and output: positive logits divided by it, others multiplied
    frequency_penalty            subtracted once for each time the token is in the output
    presence_penalty             subtracted once if the token is in the output
    temperature 0                the largest logit; the lowest id among equal logits
    otherwise                    temperature, min_p, top_k, top_p and the draw: see `draw`

The output consists of the committed tokens and those that the row assumes, so a row that verifies a draft gets the
settings that it would get if that draft had been committed. The noise is keyed by (seed, position): see `keyed_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Argmax, Backend
from outrider.backends.drawing import DrawSettings
from outrider.backends.keyed_noise import row_key
from outrider.errors import ModelError, OutriderError, RequestError
from outrider.runner.edits import edit
from outrider.runner.logprobs import TokenLogprobs, token_logprobs
from outrider.runner.request_sampling import RequestSampling, SampleRow

__all__ = ["FAILED", "RequestSampling", "SampleRow", "Sampled", "Sampler", "TokenLogprobs", "token_logprobs"]

FAILED = -1
"""The token of a row that could not be sampled; `Sampled.failed` has the reason."""


class Sampled(NamedTuple):
    tokens: list[int]
    """The token of each row; FAILED if it could not be sampled."""
    logprobs: list[TokenLogprobs | None]
    """The log-probabilities of each row whose request asked for them, else None."""
    failed: dict[int, OutriderError]
    """Why a row could not be sampled, by row. A row behind a rejected draft says nothing about its request: a failure
    counts where FAILED would be committed."""


class Sampler:
    def __init__(self, vocab_size: int, backend: Backend) -> None:
        self.vocab_size = vocab_size
        self.device = backend.device
        self.backend = backend

    def sample(
        self, logits: Tensor, rows: Sequence[SampleRow], *, logprobs: bool = True, argmax: Argmax | None = None
    ) -> Sampled:
        """Chooses a token for each row of float32 logits [rows, vocabulary], which are left as they are. Without
        `logprobs`, log-probabilities are left out even where a request asked for them. `argmax`: the argmax of
        the logits, if it is known already."""
        if not rows:
            return Sampled(tokens=[], logprobs=[], failed={})
        assert logits.shape == (len(rows), self.vocab_size) and logits.dtype == torch.float32
        tokens, values = (argmax or self.backend.argmax(logits)).read()
        if all(row.state.plain for row in rows) and all(map(math.isfinite, values)):
            return Sampled(tokens, [None] * len(rows), {})
        # Checked before a mask can hide a logit that is not finite.
        failed: dict[int, OutriderError] = {
            i: _broken(value) for i, value in enumerate(values) if not math.isfinite(value)
        }
        changed = [i for i, row in enumerate(rows) if i not in failed and (not row.state.greedy or row.edited)]
        if changed:
            self._process(logits, rows, changed, tokens, failed)
        for i in failed:
            tokens[i] = FAILED
        scores: list[TokenLogprobs | None] = [None] * len(rows)
        if logprobs:
            scores = _logprobs(logits, rows, tokens)
        return Sampled(tokens=tokens, logprobs=scores, failed=failed)

    def _process(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        where: list[int],
        tokens: list[int],
        failed: dict[int, OutriderError],
    ) -> None:
        """Chooses the tokens of the rows `where`, whose token need not be that of the largest logit."""
        edited = [i for i in where if rows[i].edited]
        work = logits
        at = {i: i for i in where}
        if edited:
            # Raw logits are still needed for log-probabilities.
            work = logits[torch.tensor(where, device=self.device)]
            at = {i: j for j, i in enumerate(where)}
            edit(work, [rows[i] for i in where])
            again, values = self.backend.argmax(work).read()
            for i in edited:
                tokens[i] = again[at[i]]
                if values[at[i]] == -math.inf:
                    failed[i] = _nothing_allowed(rows[i])
        drawn = [i for i in where if not rows[i].state.greedy and i not in failed]
        if drawn:
            found = self.backend.draw(_take(work, [at[i] for i in drawn]), self._settings([rows[i] for i in drawn]))
            for i, token in zip(drawn, found.tolist(), strict=True):
                tokens[i] = token

    def _settings(self, rows: Sequence[SampleRow]) -> DrawSettings:
        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        params = [row.state.params for row in rows]
        return DrawSettings(
            temperature=column([p.temperature for p in params], torch.float64),
            log_min_p=column([math.log(p.min_p) if p.min_p else -math.inf for p in params], torch.float64),
            top_k=column([min(p.top_k, self.vocab_size) for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float64),
            key=column([row_key(row.state.seed, row.position) for row in rows], torch.int64),
            filters=any(p.top_k or p.top_p < 1.0 for p in params),
        )


def _take(logits: Tensor, where: list[int]) -> Tensor:
    if where == list(range(logits.shape[0])):
        return logits
    return logits[torch.tensor(where, device=logits.device)]


def _nothing_allowed(row: SampleRow) -> RequestError:
    matcher = row.state.matcher
    if matcher is not None and matcher.problem is not None:
        return RequestError(f"no token may be chosen here: {matcher.problem}")
    return RequestError(
        "no token may be chosen here: the grammar, allowed_token_ids and min_tokens together rule out all of them; "
        "allow more tokens or lower min_tokens"
    )


def _broken(value: float) -> ModelError:
    what = "no finite logit" if value == -math.inf else f"a logit of {value}"
    return ModelError(
        f"the model returned {what}, so no token can be chosen; check the weights and the dtype of this model"
    )


def _logprobs(logits: Tensor, rows: Sequence[SampleRow], tokens: list[int]) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(rows)
    asked = [i for i, row in enumerate(rows) if row.state.params.logprobs is not None and tokens[i] != FAILED]
    if asked:
        counts = [rows[i].state.params.logprobs or 0 for i in asked]
        answers = token_logprobs(_take(logits, asked), [tokens[i] for i in asked], counts)
        for i, answer in zip(asked, answers, strict=True):
            found[i] = answer
    return found
