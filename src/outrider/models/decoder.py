"""One decoder for every model: what differs is in its spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.layers.attention import AttentionLayer, AttentionRows, PagedKV
from outrider.layers.ops import Ability, Greatest, Ops, Ready, Recorded
from outrider.layers.rope import rotary_table
from outrider.layers.rows import Rows
from outrider.models.kv_groups import LayerGroups
from outrider.models.parameters import DecoderParameters, DenseMLP, LayerParameters
from outrider.models.spec import DecoderSpec, RopeSpec

RECORDED_ROWS_MAX = 16
"""Steps of more rows take so long that calls no longer count."""
PLACES_KEPT_MAX = 64


class LayerKV(NamedTuple):
    """Where one layer keeps its keys and values, and the rows of this step in its group."""

    kv: PagedKV
    rows: AttentionRows


class LayerPlaces:
    """Puts rows in groups beside the KV of the layers."""

    def __init__(self, kv: Sequence[PagedKV], groups: LayerGroups) -> None:
        self._layers = [(layer, group) for layer, (group, _place) in zip(kv, groups.place, strict=True)]
        self._known: dict[int, tuple[tuple[AttentionRows, ...], tuple[LayerKV, ...]]] = {}
        """For rows that are kept."""

    def of(self, rows: Rows) -> tuple[LayerKV, ...]:
        groups = rows.groups
        known = self._known.get(id(groups))
        if known is not None and known[0] is groups:
            return known[1]
        layers = tuple([LayerKV(kv, groups[group]) for kv, group in self._layers])
        if rows.kept:
            if len(self._known) >= PLACES_KEPT_MAX:
                self._known.clear()
            self._known[id(groups)] = (groups, layers)
        return layers


class Hidden(NamedTuple):
    """What a pass gives; the next pass of the decoder may write over it."""

    final: Tensor
    """[rows, hidden], before the last norm."""
    taps: Tensor
    """Hidden states that leave the tapped layers, side by side in the order asked for: [rows, taps * hidden]."""
    logits: Tensor | None
    """Of the rows asked for, in float32."""
    greatest: Greatest | None = None
    """Of these logits, where they were looked for in the same pass."""


class _Pass(NamedTuple):
    """What was recorded, and what it ran with last."""

    recorded: Recorded[Hidden] | None
    layers: Sequence[LayerKV]
    rows: list[AttentionRows]


class _Wanted(NamedTuple):
    """Of a pass."""

    taps: tuple[int, ...]
    scored: tuple[int, int] | None
    shares: bool


_Key = tuple[int, _Wanted]


class Decoder:
    def __init__(self, spec: DecoderSpec, parameters: DecoderParameters, ops: Ops, *, max_position: int) -> None:
        _refuse_inability(spec, ops)
        self.spec = spec
        self.ops = ops
        self.parameters = ops.prepare(parameters)
        embedding = self.parameters.embedding
        # Which experts run depends on the rows.
        self._recordable = all(layer.experts is None for layer in spec.layers)
        self._recorded: dict[_Key, _Pass] = {}
        """By number of rows and what is wanted of them."""
        self._scores: Tensor | None = None
        """Logits of what is recorded: large, so all of it shares them."""
        self._places: tuple[PagedKV, ...] = ()
        """The KV that it was all recorded with: of one engine at a time, so that no other's is kept alive. It is
        kept itself: what is recorded holds addresses in it."""
        tables: dict[RopeSpec, Tensor] = {}
        for layer in spec.layers:
            if layer.rope not in tables:
                # Rotation is the one place where 16 bits would be felt: angles are large numbers.
                tables[layer.rope] = rotary_table(
                    layer.rope, max_position, dtype=torch.float32, device=embedding.device
                )
        self.attention = tuple(
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
            for layer, weights in zip(spec.layers, self.parameters.layers, strict=True)
        )

    def forward(
        self,
        tokens: Tensor,
        layers: Sequence[LayerKV],
        *,
        taps: Sequence[int] = (),
        scored: tuple[int, int] | None = None,
        shares: bool = False,
        after: Ready | None = None,
    ) -> Hidden:
        """Run the rows of a step. Tap i is the residual stream after layer i. `scored`: the rows [first, end) whose
        logits are wanted; scoring them in the same pass is quicker than afterwards. `shares`: where their largest are
        looked for, the share of these is wanted too. `after`: what has to run first."""
        hidden = self._pass(tokens, layers, _Wanted(tuple(taps), scored, shares), after)
        if self.spec.logit_softcap is None or hidden.logits is None:
            return hidden
        return hidden._replace(logits=self._capped(hidden.logits))

    def _pass(
        self,
        tokens: Tensor,
        layers: Sequence[LayerKV],
        wanted: _Wanted,
        after: Ready | None,
    ) -> Hidden:
        """With logits that are not capped yet. Recorded once for each number of rows where that is faster."""
        count = tokens.shape[0]
        if count <= RECORDED_ROWS_MAX and self._recordable:
            key = (count, wanted)
            known = self._recorded.get(key)
            if known is None or known.layers is not layers:
                known = self._recorded[key] = self._record(tokens, layers, key)
            if known.recorded is not None:
                return known.recorded.run(tokens, known.rows, after=after)
        if after is not None:
            after.run()
        return self._run(tokens, layers, wanted)

    def _record(self, tokens: Tensor, layers: Sequence[LayerKV], key: _Key) -> _Pass:
        """Unless what was recorded for other rows will do."""
        _count, wanted = key
        places = tuple([place.kv for place in layers])
        if places != self._places:
            self._recorded.clear()
            self._places = places
        known, rows = self._recorded.get(key), [place.rows for place in layers]
        if known is not None:
            return known._replace(layers=layers, rows=rows)
        recorded = self.ops.record(
            tokens, rows, lambda tokens: self._run(tokens, layers, wanted, self._room_for_scores(wanted.scored))
        )
        return _Pass(recorded, layers, rows)

    def _room_for_scores(self, scored: tuple[int, int] | None) -> Tensor | None:
        if scored is not None and self._scores is None:
            self._scores = torch.empty(RECORDED_ROWS_MAX, self.parameters.head.weight.shape[0])
        return self._scores

    def _run(
        self,
        tokens: Tensor,
        layers: Sequence[LayerKV],
        wanted: _Wanted,
        room: Tensor | None = None,
    ) -> Hidden:
        spec, ops, (taps, scored, shares) = self.spec, self.ops, wanted
        x = ops.embed(tokens, self.parameters.embedding, spec.embedding_scale)
        width = spec.hidden_size
        tapped = x.new_empty(x.shape[0], len(taps) * width)
        for number, (weights, place) in enumerate(zip(self.parameters.layers, layers, strict=True)):
            qkv = ops.project(x, weights.qkv, norm=weights.input_norm, eps=spec.norm_eps)
            attended = ops.attend(qkv, self.attention[number], place.kv, place.rows)
            x = ops.project_add(attended, weights.out, x, post_norm=weights.attention_post_norm, eps=spec.norm_eps)
            x = self.feed_forward(number, weights, x)
            for place_of_tap, tap in enumerate(taps):
                if tap == number:
                    # Later layers may write over it.
                    ops.copy(x, tapped[:, place_of_tap * width : (place_of_tap + 1) * width])
        if scored is None:
            return Hidden(x, tapped, None)
        first, end = scored
        logits = self._score(x[first:end], None if room is None else room[: end - first])
        # Capping makes neighbours equal, and then another one is the first.
        return Hidden(x, tapped, logits, ops.greatest(logits, shares=shares) if spec.logit_softcap is None else None)

    def feed_forward(self, number: int, weights: LayerParameters, x: Tensor) -> Tensor:
        """The second half of a layer, residual included."""
        spec, ops, mlp = self.spec, self.ops, weights.mlp
        if isinstance(mlp, DenseMLP):
            inner = ops.gated(x, mlp.gate_up, spec.activation, norm=weights.mlp_norm, eps=spec.norm_eps)
            return ops.project_add(inner, mlp.down, x, post_norm=weights.mlp_post_norm, eps=spec.norm_eps)
        experts = spec.layers[number].experts
        assert experts is not None
        y = ops.experts(x, mlp, experts, spec.activation, norm=weights.mlp_norm, eps=spec.norm_eps)
        return x + (y if weights.mlp_post_norm is None else ops.norm(y, weights.mlp_post_norm, spec.norm_eps))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary], in float32."""
        return self._capped(self._score(hidden))

    def _score(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        head, norm = self.parameters.head, self.parameters.final_norm
        scores = self.ops.project(hidden, head, norm=norm, eps=self.spec.norm_eps, out=out)
        return scores if scores.dtype is torch.float32 else scores.float()

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def needed_abilities(spec: DecoderSpec) -> dict[Ability, str]:
    """What these layers ask of attention, and where that is said."""
    needed = {Ability.CAUSAL: "causal attention"}
    windows = sorted({layer.window for layer in spec.layers if layer.window is not None})
    if windows:
        needed[Ability.WINDOW] = f"sliding windows of {', '.join(map(str, windows))} tokens"
    if spec.sinks:
        needed[Ability.SINKS] = "attention sinks"
    if spec.attention_softcap is not None:
        needed[Ability.SOFTCAP] = f"attention scores capped at {spec.attention_softcap:g}"
    return needed


def _refuse_inability(spec: DecoderSpec, ops: Ops) -> None:
    missing = [what for ability, what in needed_abilities(spec).items() if ability not in ops.abilities]
    if missing:
        raise ConfigError(
            f"{spec.family} models need {' and '.join(missing)}, which the operations {ops.name!r} cannot do; "
            "choose others: ops='torch' can"
        )
