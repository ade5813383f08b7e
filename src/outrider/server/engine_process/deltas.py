"""What a request has gained since the front end was last told.

A piece of text may be held back because it could begin a stop string. Tokens and text leave together: a token
is told when all of its text can be shown, so that in every delta the pieces put together are the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.outputs import CompletionOutput, RequestOutput
from outrider.runner.logprobs import TokenLogprobs
from outrider.server.messages import Delta, Ending, Scored, SpeculationFigures


class RequestReporter:
    """One request, as long as it runs."""

    def __init__(self, output: RequestOutput, *, arrival_s: float, stream: bool, tenant: str = "") -> None:
        self.output = output
        self.tenant = tenant
        self.arrival_s = arrival_s
        self.stream = stream
        self.last_tokens_s: float | None = None
        """When a step last yielded tokens for it."""
        self.tokens_seen = 0
        self.hit_noted = False
        """Whoever watches the cache has been told what it gave to this request."""
        self._cursors = [_Cursor(continuation) for continuation in output.outputs]

    def count_new_tokens(self) -> int:
        """Tokens since the last call, over all continuations."""
        seen, self.tokens_seen = self.tokens_seen, sum(len(each.token_ids) for each in self.output.outputs)
        return self.tokens_seen - seen

    def deltas(self) -> list[Delta]:
        """The last of a finished request carries its ending."""
        if not self.stream and not self.output.finished:
            return []
        name = self.output.request_id
        found = [delta for cursor in self._cursors if (delta := cursor.take(name)) is not None]
        if self.output.finished:
            nothing = Delta(request_id=name, index=0, text="", token_ids=[], pieces=[], origins="")
            found.append(_with_ending(found.pop() if found else nothing, self.output, self.arrival_s))
        return found


class _Cursor:
    """One continuation: how much of it was told."""

    def __init__(self, output: CompletionOutput) -> None:
        self._output = output
        self._tokens = 0
        self._characters = 0
        self._ended = False

    def take(self, request_id: str) -> Delta | None:
        output = self._output
        finished = output.finish_reason is not None
        if self._ended or (len(output.token_ids) == self._tokens and not finished):
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
            # Bytes that never became a character come out at the end, behind the last token.
            text = output.text[self._characters :]
        return Delta(
            request_id=request_id,
            index=output.index,
            text=text,
            token_ids=output.token_ids[start:stop],
            pieces=pieces,
            origins="".join(origin.value[0] for origin in output.origins[start:stop]),
            logprobs=None if output.logprobs is None else scored(output.logprobs[start:stop]),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    def _whole_pieces(self) -> list[str]:
        """Of tokens whose text can be shown whole."""
        pieces, room = [], len(self._output.text) - self._characters
        for piece in self._output.pieces[self._tokens :]:
            room -= len(piece)
            if room < 0:
                break
            pieces.append(piece)
        return pieces

    def _last_pieces(self) -> list[str]:
        """Of all tokens that are left: what lies behind a stop string is cut off, what was held back is added."""
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
    metrics, speculation = output.metrics, output.metrics.speculation
    assert metrics.finished_s is not None
    prompt = output.prompt_logprobs
    ending = Ending(
        arrival_s=arrival_s,
        scheduled_s=metrics.scheduled_s,
        first_token_s=metrics.first_token_s,
        finished_s=metrics.finished_s,
        prompt_tokens=len(output.prompt_token_ids),
        generated_tokens=sum(len(continuation.token_ids) for continuation in output.outputs),
        longest_tokens=max(len(continuation.token_ids) for continuation in output.outputs),
        cached_tokens=metrics.cached_tokens,
        steps=metrics.steps,
        speculation=SpeculationFigures(
            drafts=speculation.drafts,
            draft_tokens=speculation.draft_tokens,
            accepted_tokens=speculation.accepted_tokens,
            accepted_at=speculation.accepted_at,
        ),
        prompt_logprobs=None if prompt is None else [None if one is None else scored([one])[0] for one in prompt],
        error=output.error,
    )
    return Delta(
        request_id=delta.request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        pieces=delta.pieces,
        origins=delta.origins,
        logprobs=delta.logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        ending=ending,
    )
