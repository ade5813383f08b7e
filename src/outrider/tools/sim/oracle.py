"""The fake model, and the oracle that knows the right answer.

Every slot holds eight bytes, a hash of what a real slot would depend on. The device computes from bytes
it gathers through block tables; the oracle computes the same functions densely, from a token list, with no
pages at all. A wrong slot therefore gives a wrong token, and goes on giving wrong ones.

    input(p)    = token p, or at media positions what is shown there
    context(p)  = H( per target group: slots [first_key(p), p) )
    slot(g, p)  = H( weights, g, input p, context(p) )          tap(p) = H( weights, input p, context(p) )
    next token  = H( weights, input p, context(p), seed, p ) mod vocabulary

An adapter is part of the weights. A drafter fed from taps stores H(g, tap(p), inputs p+1 .. p+reach); one fed
from tokens stores H(g, input p, its own context); heads store nothing and read tap(v - 1). What a drafter gathers
before proposing must equal what the oracle gathers; only then does it know the right continuation, which it proposes
with the scenario's acceptance rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from outrider.kv.layout import KVLayout
from outrider.kv.prefix import Media

SLOT_BYTES = 8
EMPTY_SLOT = bytes(SLOT_BYTES)
_HASHER = blake2b(digest_size=SLOT_BYTES)


def digest(*parts: bytes) -> bytes:
    hasher = _HASHER.copy()
    hasher.update(b"".join(parts))
    return hasher.digest()


def word(value: int) -> bytes:
    return (value & (1 << 64) - 1).to_bytes(8, "little")


def chance(*parts: object) -> float:
    """Returns a number in [0, 1) that depends on its arguments alone, so that removing one event moves no other."""
    data = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(data, "little") / 2**64


class Inputs:
    """What a model is fed at each position: the token's word, or at media positions what is shown there."""

    def __init__(self, media: Sequence[Media] = ()) -> None:
        self._shown = {
            position: digest(b"media", item.digest, word(position - item.start))
            for item in media
            for position in range(item.start, item.end)
        }

    def at(self, position: int, token: int) -> bytes:
        return self._shown.get(position) or word(token)

    def between(self, tokens: Sequence[int], start: int, end: int) -> list[bytes]:
        """Returns the inputs of positions [start, end), as far as their tokens are known."""
        return [self.at(position, token) for position, token in enumerate(tokens[start:end], start=start)]


class FakeModel:
    """The functions that both the device and the oracle evaluate; `weights` name the model and its adapter."""

    def __init__(self, layout: KVLayout, vocabulary: int, weights: str) -> None:
        self.layout = layout
        self.vocabulary = vocabulary
        self._weights = digest(weights.encode())
        self._group_bytes = [word(group) for group in range(len(layout.groups))]

    def target_slot(self, group: int, fed: bytes, context: bytes) -> bytes:
        return digest(b"kv", self._weights, self._group_bytes[group], fed, context)

    def tap(self, fed: bytes, context: bytes) -> bytes:
        return digest(b"tap", self._weights, fed, context)

    def next_token(self, fed: bytes, context: bytes, seed: int, position: int) -> int:
        # Token 0 ends a text; it comes up often enough to matter and rarely enough to let texts grow.
        value = int.from_bytes(digest(b"out", self._weights, fed, context, word(seed), word(position)), "little")
        return value % self.vocabulary

    def tapped_slot(self, group: int, tap: bytes, later: Sequence[bytes]) -> bytes:
        return digest(b"draft", self._group_bytes[group], tap, *later)

    def token_slot(self, group: int, fed: bytes, context: bytes) -> bytes:
        return digest(b"draft", self._group_bytes[group], fed, context)


class DenseSequence:
    """One token sequence, computed without pages: the reference for everything a device gathers."""

    def __init__(self, model: FakeModel, inputs: Inputs) -> None:
        self.model = model
        self.inputs = inputs
        self.tokens: list[int] = []
        self._slots: list[list[bytes]] = [[] for _ in model.layout.groups]
        self.taps: list[bytes] = []
        self.contexts: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._add(token)

    def _add(self, token: int) -> None:
        model, layout, position = self.model, self.model.layout, len(self.tokens)
        context = digest(*(self._window(g, position, position) for g in layout.target_groups))
        fed = self.inputs.at(position, token)
        self.tokens.append(token)
        self.contexts.append(context)
        for group in layout.target_groups:
            self._slots[group].append(model.target_slot(group, fed, context))
        self.taps.append(model.tap(fed, context))
        if layout.footprint.rebuild:
            own = self._draft_context(position, position, [0] * len(layout.groups))
            for group in layout.draft_groups:
                self._slots[group].append(model.token_slot(group, fed, own))
        elif layout.footprint.groups:
            self._feed_from_taps()

    def _feed_from_taps(self) -> None:
        reach = self.model.layout.footprint.token_reach
        for group in self.model.layout.draft_groups:
            slots = self._slots[group]
            while len(slots) + reach < len(self.tokens):
                place = len(slots)
                later = self.inputs.between(self.tokens, place + 1, place + 1 + reach)
                slots.append(self.model.tapped_slot(group, self.taps[place], later))

    def _window(self, group: int, query: int, end: int, low: int = 0) -> bytes:
        first = max(low, self.model.layout.groups[group].kind.first_key(query))
        return b"".join(self._slots[group][first:end])

    def _draft_context(self, query: int, end: int, lows: Sequence[int]) -> bytes:
        return digest(*(self._window(g, query, end, lows[g]) for g in self.model.layout.draft_groups))

    def next_token(self, seed: int) -> int:
        """Returns the token that the target samples after all tokens so far."""
        last = len(self.tokens) - 1
        fed = self.inputs.at(last, self.tokens[last])
        return self.model.next_token(fed, self.contexts[last], seed, last)

    def draft_context(self, v: int, lows: Sequence[int]) -> bytes:
        """Returns what a drafter must gather before it proposes from v."""
        return self._draft_context(v, self.model.layout.footprint.durable_end(v), lows)


class Reference:
    """The right continuation of one request, computed as far as it is asked for."""

    def __init__(self, model: FakeModel, prompt: Sequence[int], seed: int, inputs: Inputs) -> None:
        self.model = model
        self.inputs = inputs
        self.dense = DenseSequence(model, inputs)
        self.dense.extend(prompt)
        self.prompt_len = len(prompt)
        self._seed = seed

    def token(self, position: int) -> int:
        dense = self.dense
        while len(dense.tokens) <= position:
            dense.extend([dense.next_token(self._seed)])
        return dense.tokens[position]

    def output(self, max_tokens: int, stop_tokens: frozenset[int]) -> list[int]:
        out: list[int] = []
        while len(out) < max_tokens:
            out.append(self.token(self.prompt_len + len(out)))
            if out[-1] in stop_tokens:
                break
        return out

    def tap(self, position: int) -> bytes:
        """Returns the target's hidden state at a position, which heads read."""
        self.token(position)
        return self.dense.taps[position]

    def draft_context(self, v: int, lows: Sequence[int]) -> bytes:
        self.token(v)
        return self.dense.draft_context(v, lows)
