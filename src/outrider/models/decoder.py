"""One decoder for every model: models differ in their specs only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.base import Argmax, Backend, Capability
from outrider.backends.batch import Batch
from outrider.errors import ConfigError
from outrider.models.kv_groups import LayerGroups
from outrider.models.parameters import DecoderParameters, DenseMLP, LayerParameters
from outrider.models.rope import rotary_table
from outrider.models.spec import DecoderSpec, RopeSpec


class DecoderOutput(NamedTuple):
    """The results of a pass. The next pass of the same decoder may overwrite them."""

    hidden: Tensor
    """[rows, hidden], before the last norm"""
    taps: Tensor
    """[rows, taps * hidden]: the residual stream after each tapped layer, side by side in the order asked for"""
    logits: Tensor | None
    """float32 [scored rows, vocabulary]"""
    argmax: Argmax | None
    """The argmax of these logits."""

    def first(self, rows: int, scored: int) -> DecoderOutput:
        """Returns the output without rows that a backend has added at the end."""
        logits, argmax = self.logits, self.argmax
        if logits is not None and logits.shape[0] > scored:
            logits, argmax = logits[:scored], None if argmax is None else argmax.first(scored)
        return DecoderOutput(self.hidden[:rows], self.taps[:rows], logits, argmax)


class _Wanted(NamedTuple):
    """The results that a caller wants from a pass."""

    taps: tuple[int, ...]
    scored: tuple[int, int] | None
    """The rows [first, end) whose logits are wanted."""
    probabilities: bool
    """Whether the probabilities of the largest logits are wanted too."""

    def padded(self, rows: int, padded_rows: int) -> _Wanted:
        """Returns the same wishes for a batch with more rows at its end: if all rows are scored, then these too."""
        return self._replace(scored=(0, padded_rows)) if self.scored == (0, rows) else self


class Decoder:
    def __init__(
        self, spec: DecoderSpec, parameters: DecoderParameters, backend: Backend, *, max_position: int
    ) -> None:
        _refuse_missing_capabilities(spec, backend)
        self.spec = spec
        self.backend = backend
        self.parameters = backend.prepare(parameters)
        device = self.parameters.embedding.device
        tables: dict[RopeSpec, Tensor] = {}
        for layer in spec.layers:
            if layer.rope not in tables:
                # Float32 in any model: angles are too large for 16 bits.
                tables[layer.rope] = rotary_table(layer.rope, max_position, dtype=torch.float32, device=device)
        self.attention = tuple(
            backend.prepare_attention(
                AttentionLayer(
                    heads=spec.heads,
                    kv_heads=spec.kv_heads,
                    head_dim=spec.head_dim,
                    scale=spec.score_scale,
                    rotary=tables[layer.rope],
                    q_norm=weights.q_norm,
                    k_norm=weights.k_norm,
                    norm_eps=spec.norm_eps,
                    softcap=spec.attention_softcap,
                    sinks=weights.sinks,
                )
            )
            for layer, weights in zip(spec.layers, self.parameters.layers, strict=True)
        )

    def bind(self, kv: Sequence[PagedKV], groups: LayerGroups) -> PagedDecoder:
        """Returns the decoder over the pages of one engine."""
        return PagedDecoder(self, kv, [group for group, _place in groups.place])

    def feed_forward(self, number: int, weights: LayerParameters, x: Tensor) -> Tensor:
        """Returns the result of a layer's second half, the residual included."""
        spec, backend, mlp = self.spec, self.backend, weights.mlp
        if isinstance(mlp, DenseMLP):
            inner = backend.gated(x, mlp.gate_up, spec.activation, norm=weights.mlp_norm, eps=spec.norm_eps)
            return backend.project_add(inner, mlp.down, x, post_norm=weights.mlp_post_norm, eps=spec.norm_eps)
        experts = spec.layers[number].experts
        assert experts is not None
        y = backend.experts(x, mlp, experts, spec.activation, norm=weights.mlp_norm, eps=spec.norm_eps)
        return x + (y if weights.mlp_post_norm is None else backend.norm(y, weights.mlp_post_norm, spec.norm_eps))

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [rows, vocabulary]."""
        return self.capped(self.scores(hidden))

    def scores(self, hidden: Tensor) -> Tensor:
        """Returns logits that are not capped yet."""
        head, norm = self.parameters.head, self.parameters.final_norm
        scores = self.backend.project(hidden, head, norm=norm, eps=self.spec.norm_eps)
        return scores if scores.dtype is torch.float32 else scores.float()

    def capped(self, logits: Tensor) -> Tensor:
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class PagedDecoder:
    """A decoder with the pages that hold its keys and values."""

    def __init__(self, decoder: Decoder, kv: Sequence[PagedKV], group_of_layer: Sequence[int]) -> None:
        self._decoder = decoder
        self._layers = list(zip(decoder.parameters.layers, decoder.attention, kv, group_of_layer, strict=True))
        # The experts that run depend on the content of the rows.
        static = all(layer.experts is None for layer in decoder.spec.layers)
        self._pass = decoder.backend.compile_pass(self._run, static=static)

    def forward(
        self,
        batch: Batch,
        *,
        taps: tuple[int, ...] = (),
        scored: tuple[int, int] | None = None,
        probabilities: bool = False,
    ) -> DecoderOutput:
        """Runs the rows of a batch. Tap i, an auxiliary hidden state, is the residual stream after layer i. `scored`:
        the rows [first, end) whose logits are wanted; scoring them in the same pass is faster than afterwards.
        `probabilities`: the probabilities of the largest logits are wanted too."""
        output = self._pass.run(batch.token_ids, batch.groups, _Wanted(taps, scored, probabilities))
        if output.hidden.shape[0] > (rows := batch.token_ids.shape[0]):
            output = output.first(rows, 0 if scored is None else scored[1] - scored[0])
        if self._decoder.spec.logit_softcap is None or output.logits is None:
            return output
        # Capping can make logits equal, and then another token may be the first of the largest.
        logits = self._decoder.capped(output.logits)
        return output._replace(logits=logits, argmax=self._decoder.backend.argmax(logits, probabilities=probabilities))

    def _run(self, token_ids: Tensor, groups: tuple[AttentionMetadata, ...], wanted: _Wanted) -> DecoderOutput:
        decoder, backend, spec = self._decoder, self._decoder.backend, self._decoder.spec
        taps, scored, probabilities = wanted
        x = backend.embed(token_ids, decoder.parameters.embedding, spec.embedding_scale)
        width = spec.hidden_size
        tapped = x.new_empty(x.shape[0], len(taps) * width)
        for number, (weights, attention, kv, group) in enumerate(self._layers):
            qkv = backend.project(x, weights.qkv, norm=weights.input_norm, eps=spec.norm_eps)
            attended = backend.attend(qkv, attention, kv, groups[group])
            x = backend.project_add(attended, weights.out, x, post_norm=weights.attention_post_norm, eps=spec.norm_eps)
            x = decoder.feed_forward(number, weights, x)
            for place, tap in enumerate(taps):
                if tap == number:
                    # Later layers may overwrite x.
                    backend.copy(x, tapped[:, place * width : (place + 1) * width])
        if scored is None:
            return DecoderOutput(x, tapped, None, None)
        first, end = scored
        logits = decoder.scores(x[first:end])
        argmax = backend.argmax(logits, probabilities=probabilities) if spec.logit_softcap is None else None
        return DecoderOutput(x, tapped, logits, argmax)


def needed_capabilities(spec: DecoderSpec) -> dict[Capability, str]:
    """Returns the capabilities that these layers need, each with its description for messages."""
    needed = {Capability.CAUSAL: "causal attention"}
    windows = sorted({layer.window for layer in spec.layers if layer.window is not None})
    if windows:
        needed[Capability.WINDOW] = f"sliding windows of {', '.join(map(str, windows))} tokens"
    if spec.sinks:
        needed[Capability.SINKS] = "attention sinks"
    if spec.attention_softcap is not None:
        needed[Capability.SOFTCAP] = f"attention scores capped at {spec.attention_softcap:g}"
    return needed


def _refuse_missing_capabilities(spec: DecoderSpec, backend: Backend) -> None:
    missing = [what for need, what in needed_capabilities(spec).items() if need not in backend.capabilities]
    if missing:
        raise ConfigError(
            f"{spec.family} models need {' and '.join(missing)}, which the backend {backend.name!r} lacks; choose "
            "another one, such as backend='reference'"
        )
