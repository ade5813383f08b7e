"""What a request has gained since the last report to the front end.

A piece of text may be held back because it could begin a stop string. Tokens and text are reported together: a token
is reported when all of its text can be shown, so that in every delta the joined pieces are the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from outrider.engine.outputs import CompletionOutput, RequestOutput
from outrider.runner.logprobs import TokenLogprobs
from outrider.server.messages import Delta, Ending, Scored, TransferFigures


class RequestReporter:
    """Reports what one request has gained, as long as it runs."""

    def __init__(self, output: RequestOutput, *, arrival_s: float, stream: bool, tenant: str = "") -> None:
        self.output = output
        self.tenant = tenant
        self.arrival_s = arrival_s
        self.stream = stream
        self.last_tokens_s: float | None = None
        """When a step last yielded tokens for the request."""
        self.tokens_seen = 0
        self.hit_noted = False
        """Whether the request's cache hit is among the recent hits."""
        self._cursors = [_Cursor(continuation) for continuation in output.outputs]

    def count_new_tokens(self) -> int:
        """Returns the number of tokens since the last call, over all continuations."""
        seen, self.tokens_seen = self.tokens_seen, sum(each.num_tokens for each in self.output.outputs)
        return self.tokens_seen - seen

    def deltas(self) -> list[Delta]:
        """Returns what is new. The last delta of a finished request carries its ending."""
        if not self.stream and not self.output.finished:
            return []
        name = self.output.request_id
        found = [delta for cursor in self._cursors if (delta := cursor.take(name)) is not None]
        if self.output.finished:
            nothing = Delta(request_id=name, index=0, text="", token_ids=[], pieces=[], origins="")
            found.append(_with_ending(found.pop() if found else nothing, self.output, self.arrival_s))
        return found


class _Cursor:
    """How much of one continuation was reported."""

    def __init__(self, output: CompletionOutput) -> None:
        self._output = output
        self._tokens = 0
        self._characters = 0
        self._ended = False

    def take(self, request_id: str) -> Delta | None:
        output = self._output
        finished = output.finish_reason is not None
        if self._ended or (output.num_tokens == self._tokens and not finished):
            return None
        start = self._tokens
        pieces = self._last_pieces() if finished else self._whole_pieces()
        if not pieces and not finished:
            return None
        stop = start + len(pieces)
        text = "".join(pieces)
        self._tokens, self._ended = stop, finished
        self._characters += len(text)
        if finished and not pieces:
            # Bytes that never became a character come out at the end, after the last token.
            text = output.text[self._characters :]
        return Delta(
            request_id=request_id,
            index=output.index,
            text=text,
            token_ids=output.token_ids_between(start, stop),
            pieces=pieces,
            origins="".join(origin.value[0] for origin in output.origins[start:stop]),
            logprobs=None if output.logprobs is None else scored(output.logprobs[start:stop]),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    def _whole_pieces(self) -> list[str]:
        """Returns the pieces of the tokens whose text can be shown whole."""
        pieces, room = [], len(self._output.text) - self._characters
        for piece in self._output.pieces[self._tokens :]:
            room -= len(piece)
            if room < 0:
                break
            pieces.append(piece)
        return pieces

    def _last_pieces(self) -> list[str]:
        """Returns the pieces of all tokens that are left. What follows a stop string is cut off; what was held back is
        added."""
        pieces, rest = [], self._output.text[self._characters :]
        for piece in self._output.pieces[self._tokens :]:
            pieces.append(rest[: len(piece)])
            rest = rest[len(piece) :]
        if pieces:
            pieces[-1] += rest
        return pieces


def scored(entries: Sequence[TokenLogprobs]) -> list[Scored]:
    return [Scored(token=entry.token, logprob=entry.logprob, top=list(entry.top)) for entry in entries]


def _with_ending(delta: Delta, output: RequestOutput, arrival_s: float) -> Delta:
    metrics, prompt = output.metrics, output.prompt_logprobs
    assert metrics.finished_s is not None
    ending = Ending(
        arrival_s=arrival_s,
        scheduled_s=metrics.scheduled_s,
        first_token_s=metrics.first_token_s,
        finished_s=metrics.finished_s,
        prompt_tokens=output.prompt_len,
        generated_tokens=sum(continuation.num_tokens for continuation in output.outputs),
        longest_tokens=max(continuation.num_tokens for continuation in output.outputs),
        cached_tokens=metrics.cached_tokens,
        steps=metrics.steps,
        speculation=metrics.speculation,
        prompt_logprobs=None if prompt is None else [None if one is None else scored([one])[0] for one in prompt],
        error=output.error,
        is_engine_fault=not output.error_is_callers,
        error_code=output.error_code,
        ticket=output.ticket,
        transferred_tokens=metrics.transferred_tokens,
        transfer=None if metrics.transfer is None else TransferFigures(**asdict(metrics.transfer)),
    )
    return msgspec.structs.replace(delta, ending=ending)
