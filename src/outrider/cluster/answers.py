"""Results of the engine as the chunks that Dynamo's front end reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from outrider.engine.outputs import CompletionOutput, RequestOutput
from outrider.runner.logprobs import TokenLogprobs

FINISH_REASONS = {"abort": "cancelled", "prefilled": "length"}
Chunk = dict[str, Any]


class Chunks:
    """What is new in a request's result each time."""

    def __init__(self, spell: Callable[[int], str]) -> None:
        self._spell = spell
        self._sent: dict[int, int] = {}

    def of(self, output: RequestOutput) -> Iterator[Chunk]:
        """Yields a chunk for each continuation that has new tokens or has ended."""
        for continuation in output.outputs:
            start, end = self._sent.get(continuation.index, 0), continuation.num_tokens
            if start == end and continuation.finish_reason is None:
                continue
            if start < 0:
                continue
            self._sent[continuation.index] = end if continuation.finish_reason is None else -1
            chunk: Chunk = {"token_ids": continuation.token_ids_between(start, end), "index": continuation.index}
            if continuation.logprobs is not None and end > start:
                self._add_logprobs(chunk, continuation, start, end)
            if continuation.finish_reason is not None:
                chunk["finish_reason"] = FINISH_REASONS.get(continuation.finish_reason, continuation.finish_reason)
                chunk["completion_usage"] = usage_of(output)
            yield chunk

    def _add_logprobs(self, chunk: Chunk, continuation: CompletionOutput, start: int, end: int) -> None:
        assert continuation.logprobs is not None
        entries = continuation.logprobs[start:end]
        chunk["log_probs"] = [entry.logprob for entry in entries]
        chunk["top_logprobs"] = [self._top(entry) for entry in entries]

    def _top(self, entry: TokenLogprobs) -> list[dict[str, Any]]:
        """Returns the most likely tokens, the chosen one always among them."""
        tokens = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        if entry.token not in [token for token, _logprob, _rank in tokens]:
            tokens.append((entry.token, entry.logprob, entry.rank))
        return [
            {"rank": rank, "token_id": token, "token": self._spell(token), "logprob": logprob}
            for token, logprob, rank in tokens
        ]


def usage_of(output: RequestOutput) -> dict[str, Any]:
    generated = sum(continuation.num_tokens for continuation in output.outputs)
    return {
        "prompt_tokens": output.prompt_len,
        "completion_tokens": generated,
        "total_tokens": output.prompt_len + generated,
        "prompt_tokens_details": {"cached_tokens": output.metrics.cached_tokens},
    }
