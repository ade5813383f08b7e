"""Conversations that the target holds with itself: many in lockstep, one token of each per step.

Every conversation is a stream of the same length. What a stream does at a position is decided on the device, so that a
step is always the same sequence of kernels and can be replayed as a CUDA graph:

    prompt ──► answer ──► bridge ──► question ──► bridge ──► answer ──► …

Prompts and bridges (the tokens between turns) are given, and so may be the next few questions; answers and further
questions are sampled until an end token. A stream may also begin with a question that the target invents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.backends.keyed_noise import GAMMA
from outrider.errors import ConfigError
from outrider.models.parameters import DenseMLP
from outrider.tools.training.corpus import Streams
from outrider.tools.training.pooling import wide_logits
from outrider.tools.training.target import REFERENCE, Target, after_attention, queries_keys_values, tensors_of

PROMPT, ANSWER, TO_QUESTION, QUESTION, TO_ANSWER, IDLE = range(6)
LENGTH_STEP = 128
"""Without the fused kernels, attention reads a multiple of this many keys."""
WARMUP_STEPS = 3
NOISE_KEYS = 1 << 61


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Token ids that end turns and lead from one turn to the next."""

    end: int
    """Token that ends an answer or a question."""
    to_question: tuple[int, ...]
    """Tokens between an answer's end and the next question."""
    to_answer: tuple[int, ...]
    """Tokens between a question's end and its answer."""
    question_temperature: float = 0.8
    single: bool = False
    """Whether to stop after the first answer; the rest of the stream is filled with the end token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The beginning of one conversation."""

    ids: Sequence[int]
    temperature: float = 0.0
    """Temperature of the answers."""
    invents: bool = False
    """Whether the ids lead up to a question that the target invents."""
    turns: Sequence[Sequence[int]] = ()
    """Given questions, each with all tokens between the end of an answer and the next one."""


class Lockstep:
    """A fixed number of streams of a fixed length, with their keys and values."""

    def __init__(
        self,
        target: Target,
        *,
        streams: int,
        length: int,
        conversation: Conversation,
        seed: int,
        compiled: bool = False,
    ) -> None:
        """With `compiled`, layers are compiled first, which pays for many streams."""
        self.target, self.streams, self.length, self.conversation = target, streams, length, conversation
        device, spec = target.device, target.spec
        self.fused = device.type == "cuda"
        """Whether attention and sampling use the Triton kernels."""
        self._before, self._after = queries_keys_values, after_attention
        if compiled and device.type == "cuda":
            self._before = torch.compile(queries_keys_values, dynamic=False)
            self._after = torch.compile(after_attention, dynamic=False)
        shape = (len(spec.layers), 2, streams, spec.kv_heads, length, spec.head_dim)
        self.kv = torch.zeros(shape, dtype=target.parameters.embedding.dtype, device=device)
        torch.manual_seed(seed)
        self.noise = torch.tensor(seed * GAMMA % NOISE_KEYS, device=device)
        """Key of the next step's noise in the fused kernels."""
        self.tokens = torch.zeros(streams, length + 1, dtype=torch.int64, device=device)
        self.roles = torch.zeros(streams, length + 1, dtype=torch.bool, device=device)
        self.prompt_stop = torch.zeros(streams, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(streams, device=device)
        self.mode = torch.zeros(streams, dtype=torch.int64, device=device)
        self.given = torch.zeros(streams, dtype=torch.int64, device=device)
        """Number of tokens of the current bridge that have been placed."""
        self.invents = torch.zeros(streams, dtype=torch.bool, device=device)
        self.script = torch.zeros(streams, length, dtype=torch.int64, device=device)
        """Given turns, one after the other."""
        self.turn_ends = torch.zeros(streams, length, dtype=torch.bool, device=device)
        self.script_placed = torch.zeros(streams, dtype=torch.int64, device=device)
        """Number of script tokens that have been placed."""
        self.script_stop = torch.zeros(streams, dtype=torch.int64, device=device)
        """Number of script tokens."""
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self._bridges = [torch.tensor(bridge, device=device) for bridge in self._bridge_ids()]
        # Constants are tensors on the device: nothing may be copied to it while a graph is captured.
        self._modes = torch.arange(6, device=device)
        self._end = torch.tensor(conversation.end, device=device)
        self._zero = torch.zeros((), dtype=torch.int64, device=device)
        self._question_temperature = torch.tensor(conversation.question_temperature, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tables = {layer.rope: target.rotary(layer.rope, length) for layer in spec.layers}
        if any(layer.window is not None for layer in spec.layers):
            raise ConfigError("conversations cannot be generated for targets with sliding windows yet")

    def _bridge_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        conversation = self.conversation
        if not conversation.single and not (conversation.to_question and conversation.to_answer):
            raise ConfigError("conversations of several turns need the tokens between turns")
        return conversation.to_question or (conversation.end,), conversation.to_answer or (conversation.end,)

    @torch.no_grad()
    def run(
        self,
        openings: Sequence[Opening],
        *,
        steps: int | None = None,
        progress: Callable[[int], None] = lambda _position: None,
    ) -> Streams:
        """Writes one stream per opening, each of which must leave room for an answer; `progress` gets each position."""
        assert len(openings) == self.streams
        table = np.zeros((self.streams, self.length + 1), dtype=np.int64)
        script = np.zeros((self.streams, self.length), dtype=np.int64)
        turn_ends = np.zeros((self.streams, self.length), dtype=np.bool_)
        script_stop = np.zeros(self.streams, dtype=np.int64)
        for number, opening in enumerate(openings):
            assert 0 < len(opening.ids) < self.length
            table[number, : len(opening.ids)] = opening.ids
            for turn in opening.turns:
                start, stop = script_stop[number], script_stop[number] + len(turn)
                if stop > self.length:
                    break
                script[number, start:stop] = turn
                turn_ends[number, stop - 1] = True
                script_stop[number] = stop
        self.tokens.copy_(torch.from_numpy(table))
        self.script.copy_(torch.from_numpy(script))
        self.turn_ends.copy_(torch.from_numpy(turn_ends))
        self.script_stop.copy_(torch.from_numpy(script_stop))
        self.script_placed.zero_()
        self.roles.zero_()
        self.prompt_stop.copy_(torch.tensor([len(opening.ids) for opening in openings]))
        self.temperature.copy_(torch.tensor([opening.temperature for opening in openings], dtype=torch.float32))
        self.invents.copy_(torch.tensor([opening.invents for opening in openings]))
        self.mode.zero_()
        self.given.zero_()
        self.position.zero_()
        for position in range(min(self.length - 1, steps or self.length)):
            progress(position)
            self._replay(min(self.length, (position // LENGTH_STEP + 1) * LENGTH_STEP))
        return Streams(
            tokens=self.tokens[:, : self.length].cpu().numpy(), roles=self.roles[:, : self.length].cpu().numpy()
        )

    def _replay(self, num_keys: int) -> None:
        if not self.tokens.is_cuda:
            self._step(num_keys)
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        state = (self.tokens, self.roles, self.mode, self.given, self.script_placed, self.position, self.noise)
        before = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                self._step(self.length)
                restore()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(self.length)
        restore()
        return graph

    def _step(self, num_keys: int) -> None:
        """Reads the token at `position` and decides the next one."""
        at = self.position.view(1, 1).expand(self.streams, 1)
        logits = self._logits(self.tokens.gather(1, at)[:, 0], num_keys)
        sampled = self._sample(logits)
        self._place(sampled)
        self.position += 1

    def _logits(self, tokens: Tensor, num_keys: int) -> Tensor:
        target, spec = self.target, self.target.spec
        x = target.embed(tokens)
        rows = {rope: table.index_select(0, self.position.view(1)) for rope, table in self._tables.items()}
        for number, (layer, parameters) in enumerate(zip(spec.layers, target.parameters.layers, strict=True)):
            assert isinstance(parameters.mlp, DenseMLP)
            weights = tensors_of(parameters)
            q, k, v = self._before(x[:, None], weights, rows[layer.rope], spec)
            # Query heads that share a key head become its rows.
            grouped = q.view(self.streams, spec.kv_heads, -1, spec.head_dim) * spec.score_scale
            attended = self._attend(grouped, k[:, 0], v[:, 0], self.kv[number], num_keys)
            x = self._after(x, attended.flatten(1), weights, spec)
        return wide_logits(REFERENCE.norm(x, target.parameters.final_norm, spec.norm_eps), target.head)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, num_keys: int) -> Tensor:
        keys, values = kv.unbind()
        if self.fused:
            # Imported where it is used: machines without a GPU need not have Triton.
            from outrider.tools.training.lockstep_triton import attend_one as attend_one_fused

            return attend_one_fused(q, k, v, keys, values, self.position)
        place = self.position.view(1)
        keys.index_copy_(2, place, k[:, :, None])
        values.index_copy_(2, place, v[:, :, None])
        return attend_one(q, keys, values, self.position, num_keys)

    def _sample(self, logits: Tensor) -> Tensor:
        """Samples a token per row: greedy at temperature 0, otherwise by Gumbel noise."""
        temperature = torch.where(self.mode == QUESTION, self._question_temperature, self.temperature)
        if self.fused:
            from outrider.tools.training.lockstep_triton import pick

            sampled = pick(logits, temperature, self.noise)
            self.noise += self.streams
            return sampled
        noise = torch.empty_like(logits).exponential_().log_()
        scale = temperature[:, None]
        return torch.where(scale > 0, logits - scale * noise, logits).argmax(-1)

    def _place(self, sampled: Tensor) -> None:
        """Places the next token of every stream according to its mode, and sets its next mode."""
        conversation, mode, modes = self.conversation, self.mode, self._modes
        following = self.position + 1
        at = following.view(1, 1).expand(self.streams, 1)
        prompt = self.tokens.gather(1, at)[:, 0]
        to_question, to_answer = self._bridges
        # The token after the prompt is the first of an answer or of an invented question.
        first = torch.where(self.invents, modes[QUESTION], modes[ANSWER])
        mode = torch.where((mode == PROMPT) & (following >= self.prompt_stop), first, mode)
        scripted = (mode == TO_QUESTION) & (self.script_placed < self.script_stop)
        script_at = self.script_placed.clamp(max=self.length - 1)[:, None]
        token = torch.where(mode == PROMPT, prompt, sampled)
        token = torch.where(mode == TO_QUESTION, to_question[self.given.clamp(max=len(to_question) - 1)], token)
        token = torch.where(scripted, self.script.gather(1, script_at)[:, 0], token)
        token = torch.where(mode == TO_ANSWER, to_answer[self.given.clamp(max=len(to_answer) - 1)], token)
        token = torch.where(mode == IDLE, self._end, token)
        self.tokens.scatter_(1, at, token[:, None])
        self.roles.scatter_(1, at, (mode == ANSWER)[:, None])
        given = torch.where((mode == TO_QUESTION) | (mode == TO_ANSWER), self.given + 1, self._zero)
        ended = token == conversation.end
        after = IDLE if conversation.single else TO_QUESTION
        mode = torch.where((mode == ANSWER) & ended, modes[after], mode)
        mode = torch.where((mode == QUESTION) & ended, modes[TO_ANSWER], mode)
        mode = torch.where((mode == TO_QUESTION) & ~scripted & (given == len(to_question)), modes[QUESTION], mode)
        mode = torch.where(scripted & self.turn_ends.gather(1, script_at)[:, 0], modes[ANSWER], mode)
        self.script_placed += scripted
        mode = torch.where((mode == TO_ANSWER) & (given == len(to_answer)), modes[ANSWER], mode)
        self.given.copy_(torch.where((mode == QUESTION) | (mode == ANSWER), self._zero, given))
        self.mode.copy_(mode)


def attend_one(q: Tensor, keys: Tensor, values: Tensor, position: Tensor, num_keys: int) -> Tensor:
    """Attends from q, [streams, key heads, rows, head_dim], to the keys up to `position`.

    `q` is scaled; keys and values: [streams, key heads, length, head_dim]. Only the first `num_keys` are looked at,
    which must be more than `position`.
    """
    unseen = torch.arange(num_keys, device=q.device) > position
    scores = q @ keys[:, :, :num_keys].mT
    weights = torch.softmax(scores.float().masked_fill(unseen, float("-inf")), dim=-1)
    return weights.to(q.dtype) @ values[:, :, :num_keys]
