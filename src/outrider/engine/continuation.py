"""One continuation of a prompt as it grows: text, log-probabilities, why it ended."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.detokenize import Detokenizer
from outrider.engine.outputs import CompletionOutput, Origin
from outrider.engine.stopping import StopStrings
from outrider.models.tokenizer import Tokenizer
from outrider.runner.sampler import RequestSampling, TokenLogprobs


class Continuation:
    def __init__(self, sequence_id: str, index: int, sampling: RequestSampling, tokenizer: Tokenizer) -> None:
        """`sequence_id` is the continuation's key in the scheduler, the runner and the KV manager."""
        params = sampling.params
        self.sequence_id = sequence_id
        self.sampling = sampling
        self.output = CompletionOutput(index=index)
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._params = params
        self._stop_strings = StopStrings(params.stop_strings)
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._text = ""
        """All text so far; output.text leaves out what may be the beginning of a stop string."""

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def take(
        self,
        tokens: Sequence[int],
        origins: Sequence[Origin],
        logprobs: Sequence[TokenLogprobs] | None,
        finish: str | None,
    ) -> bool:
        """Add tokens that were committed; True if a stop string ends the text, which the scheduler cannot know."""
        if finish is None and logprobs is None and not self._stop_strings:
            # The common case: nothing can end it.
            output, pieces = self.output, [self._detokenizer.push(token) for token in tokens]
            output.origins.extend(origins)
            output.pieces.extend(pieces)
            self._text += "".join(pieces)
            output.text = self._text
            return False
        for place, token in enumerate(tokens):
            self.output.origins.append(origins[place])
            if logprobs is not None and self.output.logprobs is not None:
                self.output.logprobs.append(logprobs[place])
                self.output.cumulative_logprob = (self.output.cumulative_logprob or 0.0) + logprobs[place].logprob
            stopping = finish == "stop" and place == len(tokens) - 1
            if stopping:
                self.output.stop_reason = token if token in self._params.stop_tokens else None
            piece = "" if stopping and not self._params.include_stop_str_in_output else self._detokenizer.push(token)
            self.output.pieces.append(piece)
            if self._add_text(piece):
                return finish is None
        if finish is not None:
            self.end(finish)
        self._show()
        return False

    def _add_text(self, piece: str) -> bool:
        """Add a token's text; True if it completes a stop string, which then ends the text."""
        searched = len(self._text)
        self._text += piece
        if not piece:
            return False
        found = self._stop_strings.find(self._text, searched)
        if found is None or self.output.num_tokens < self._params.min_tokens:
            return False
        place, string = found
        self._text = (
            self._text[: place + len(string)] if self._params.include_stop_str_in_output else self._text[:place]
        )
        self.output.text = self._text
        self.output.finish_reason, self.output.stop_reason = "stop", string
        return True

    def _show(self) -> None:
        safe = len(self._text) if self.finished else self._stop_strings.safe_length(self._text)
        self.output.text = self._text[:safe]

    def end(self, finish: str) -> None:
        """End the text, with what the detokenizer still holds back."""
        if self.finished:
            return
        found = self._add_text(self._detokenizer.finish())
        if not found:
            self.output.finish_reason = finish
            self.output.text = self._text
