"""A request as the engine sees it: what its caller asked for, and its continuations."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

from outrider.engine.continuation import Continuation
from outrider.engine.outputs import RequestOutput
from outrider.errors import RequestError


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not ended."""

    output: RequestOutput
    continuations: list[Continuation]
    """The first runs the prompt; the others fork from it when the prompt has been computed."""
    salt: str
    takes_first_token: bool = False
    """Whether the first token is the one that a prefill worker sampled."""
    transfer_failure: str = ""
    """Why KV of a prefill worker did not arrive, as far as it did not."""

    @property
    def id(self) -> str:
        return self.output.request_id

    @property
    def sequence_ids(self) -> list[str]:
        return [continuation.sequence_id for continuation in self.continuations]

    @property
    def finished(self) -> bool:
        return all(continuation.finished for continuation in self.continuations)


def checked_prompt(request_id: str, given: Sequence[int], *, vocab_size: int) -> array[int]:
    """Returns a prompt as token ids of this model, or refuses it with the reason.

    Behind this check, the engine trusts token ids: an index outside the vocabulary would end the whole process on
    CUDA.
    """
    if isinstance(given, (str, bytes, bytearray)) or not isinstance(given, Sequence):
        raise RequestError(
            f"request {request_id!r}: a prompt must be text or a list of token ids, got {type(given).__name__}"
        )
    if not len(given):
        raise RequestError(f"request {request_id!r}: the prompt is empty; send at least one token")
    try:
        tokens = [index(token) for token in given]
    except TypeError:
        tokens = []
    if not tokens or any(isinstance(token, bool) for token in given):
        raise RequestError(f"request {request_id!r}: every token id must be a whole number")
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RequestError(
            f"request {request_id!r}: token id {outside} is not in the vocabulary of {vocab_size} tokens; "
            "use this model's tokenizer"
        )
    return array("I", tokens)
