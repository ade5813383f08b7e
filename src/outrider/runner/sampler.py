"""The sampler: logits and the requests' settings in, tokens out. A pure function of each row.

In vLLM's order:

    mask, allowed_token_ids      all other tokens become impossible
    min_tokens                   until reached, end-of-text and stop tokens become impossible
    logit_bias                   added
    repetition_penalty           tokens of prompt and output: positive logits divided by it, others multiplied
    frequency_penalty            subtracted once for each time the token is in the output
    presence_penalty             subtracted once if the token is in the output
    temperature 0                the largest logit; the lowest id of equal ones
    otherwise                    temperature, min_p, top_k, top_p and the draw: see `draw`

"Output" is what was committed and what the row assumes, so a row that verifies a draft sees exactly what it
would see if that draft had been committed. The noise is keyed by (seed, position): see `noise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import RequestError
from outrider.kernels.portable import row_key
from outrider.layers.ops import Greatest
from outrider.runner.draw import DrawSettings, draw, draw_compiled, draw_fused
from outrider.runner.edits import edit
from outrider.runner.logprobs import TokenLogprobs, token_logprobs
from outrider.runner.request_sampling import RequestSampling, SampleRow

__all__ = ["FAILED", "RequestSampling", "SampleRow", "Sampled", "Sampler", "TokenLogprobs", "token_logprobs"]

FAILED = -1
"""Stands for the token of a row that could not be sampled; `Sampled.failed` says why."""


class Sampled(NamedTuple):
    tokens: list[int]
    """One for each row; FAILED where there is none."""
    logprobs: list[TokenLogprobs | None]
    """For rows whose request asked."""
    failed: dict[int, RequestError]
    """By row. A row behind a rejected draft says nothing about its request: a failure counts where FAILED would
    be committed."""


class Sampler:
    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._draw = {"cpu": draw_compiled, "cuda": draw_fused}.get(self.device.type, draw)

    def sample(
        self, logits: Tensor, rows: Sequence[SampleRow], *, logprobs: bool = True, found: Greatest | None = None
    ) -> Sampled:
        """`logits` is float32 [rows, vocab] and is left as it is. Without `logprobs` nobody gets those asked for.
        `found`: the largest of each row, where somebody has looked already."""
        if found is None:
            assert logits.shape == (len(rows), self.vocab_size) and logits.dtype == torch.float32
            if not rows:
                return Sampled(tokens=[], logprobs=[], failed={})
            tokens, values = largest(logits)
        else:
            tokens, values = found.read()
            assert len(tokens) == len(rows)
            if all(row.state.plain for row in rows) and all(map(math.isfinite, values)):
                return Sampled(tokens, [None] * len(rows), {})
        # A broken row is seen before a mask can hide what is broken.
        failed = {i: _broken(value) for i, value in enumerate(values) if not math.isfinite(value)}
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
        failed: dict[int, RequestError],
    ) -> None:
        """Choose again at the rows `where`, whose token is not simply that of the largest logit."""
        edited = [i for i in where if rows[i].edited]
        work = logits
        at = {i: i for i in where}
        if edited:
            # Raw logits are still needed for log-probabilities.
            work = logits[torch.tensor(where, device=self.device)]
            at = {i: j for j, i in enumerate(where)}
            edit(work, [rows[i] for i in where])
            again, values = largest(work)
            for i in edited:
                tokens[i] = again[at[i]]
                if values[at[i]] == -math.inf:
                    failed[i] = RequestError(
                        "no token may be chosen here: the mask, allowed_token_ids and min_tokens together rule out "
                        "all of them; allow more tokens or lower min_tokens"
                    )
        drawn = [i for i in where if not rows[i].state.greedy and i not in failed]
        if drawn:
            found = self._draw(_take(work, [at[i] for i in drawn]), self._settings([rows[i] for i in drawn]))
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


def largest(logits: Tensor) -> tuple[list[int], list[float]]:
    """The lowest id of each row's largest logit, and that logit; NaN is larger than any number."""
    if logits.device.type == "cpu":
        # Ten times as fast as torch's.
        array = logits.numpy()
        best = array.argmax(axis=-1)
        return (ids := best.tolist()), [float(row[token]) for row, token in zip(array, ids, strict=True)]
    ids = logits.argmax(dim=-1, keepdim=True)
    # Together, to wait for the device once.
    pairs = torch.cat([ids.to(torch.float64), logits.gather(-1, ids).to(torch.float64)], dim=-1).tolist()
    return [int(token) for token, _ in pairs], [value for _, value in pairs]


def _broken(value: float) -> RequestError:
    what = "no finite logit" if value == -math.inf else f"a logit of {value}"
    return RequestError(
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
