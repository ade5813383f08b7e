"""The frozen target in training: whole streams at once, with taps (auxiliary hidden states), in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider.backends.reference.backend import ReferenceBackend, rotate
from outrider.errors import ConfigError
from outrider.models.parameters import DecoderParameters, DenseMLP, LayerParameters, plain
from outrider.models.resolve import resolve_model, weights_fingerprint
from outrider.models.rope import rotary_table
from outrider.models.spec import DecoderSpec, LayerSpec, RopeSpec
from outrider.models.weights import load_parameters, open_checkpoint

REFERENCE = ReferenceBackend()


class TargetStates(NamedTuple):
    taps: Tensor
    """[streams, positions, taps * hidden]: residual streams after the tapped layers, side by side."""
    final: Tensor
    """[streams, positions, hidden]: the input of the head, after the last norm."""


class Target:
    """A decoder over dense [streams, positions] batches whose weights are not trained."""

    def __init__(self, spec: DecoderSpec, parameters: DecoderParameters, *, name: str, fingerprint: str = "") -> None:
        _refuse_unsupported(spec)
        self.spec = spec
        self.parameters = parameters
        self.name = name
        self.fingerprint = fingerprint
        self.device = parameters.embedding.device
        self._tables: dict[tuple[RopeSpec, int], Tensor] = {}
        self._layer = dense_layer
        self.row_scores = row_scores

    def compile(self) -> None:
        # One layer, not the whole network: every layer then runs the same compiled code.
        self._layer = torch.compile(dense_layer, dynamic=False)
        self.row_scores = torch.compile(row_scores, dynamic=False)

    def rotary(self, rope: RopeSpec, positions: int) -> Tensor:
        key = (rope, positions)
        if key not in self._tables:
            self._tables[key] = rotary_table(rope, positions, dtype=torch.float32, device=self.device)
        return self._tables[key]

    def embed(self, tokens: Tensor) -> Tensor:
        return REFERENCE.embed(tokens, self.parameters.embedding, self.spec.embedding_scale)

    @property
    def head(self) -> Tensor:
        """[vocabulary, hidden]"""
        return plain(self.parameters.head.weight)

    @torch.no_grad()
    def states(self, tokens: Tensor, taps: Sequence[int]) -> TargetStates:
        spec = self.spec
        x = self.embed(tokens)
        tapped: dict[int, Tensor] = {}
        for number, (layer, weights) in enumerate(zip(spec.layers, self.parameters.layers, strict=True)):
            assert isinstance(weights.mlp, DenseMLP)
            table = self.rotary(layer.rope, tokens.shape[1])
            x = self._layer(x, tensors_of(weights), table, spec, layer.window)
            if number in taps:
                tapped[number] = x
        final = REFERENCE.norm(x, self.parameters.final_norm, spec.norm_eps)
        return TargetStates(torch.cat([tapped[tap] for tap in taps], dim=-1), final)


def tensors_of(weights: LayerParameters) -> tuple[Tensor | None, ...]:
    assert isinstance(weights.mlp, DenseMLP)
    return (
        weights.input_norm,
        plain(weights.qkv.weight),
        weights.qkv.bias,
        weights.q_norm,
        weights.k_norm,
        plain(weights.out.weight),
        weights.mlp_norm,
        plain(weights.mlp.gate_up.weight),
        plain(weights.mlp.down.weight),
        weights.attention_post_norm,
        weights.mlp_post_norm,
    )


def dense_layer(
    x: Tensor, weights: tuple[Tensor | None, ...], table: Tensor, spec: DecoderSpec, window: int | None
) -> Tensor:
    """One decoder layer over [streams, positions, hidden]."""
    q, k, v = queries_keys_values(x, weights, table, spec)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mask = None if window is None else window_mask(x.shape[1], window, x.device)
    attended = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.score_scale, enable_gqa=True
    )
    return after_attention(x, attended.transpose(1, 2).flatten(2), weights, spec)


def queries_keys_values(
    x: Tensor, weights: tuple[Tensor | None, ...], table: Tensor, spec: DecoderSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values, each [..., heads, head_dim]; the first two rotated by the rows of the table."""
    input_norm, qkv_weight, qkv_bias, q_norm, k_norm = weights[:5]
    assert input_norm is not None and qkv_weight is not None
    qkv = functional.linear(REFERENCE.norm(x, input_norm, spec.norm_eps), qkv_weight, qkv_bias)
    q, k, v = qkv.split([spec.query_size, spec.kv_size, spec.kv_size], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in (q, k, v))
    if q_norm is not None and k_norm is not None:
        q, k = REFERENCE.norm(q, q_norm, spec.norm_eps), REFERENCE.norm(k, k_norm, spec.norm_eps)
    return rotate(q, table), rotate(k, table), v


def after_attention(x: Tensor, attended: Tensor, weights: tuple[Tensor | None, ...], spec: DecoderSpec) -> Tensor:
    out, mlp_norm, gate_up, down, attention_post_norm, mlp_post_norm = weights[5:]
    assert out is not None and mlp_norm is not None and gate_up is not None and down is not None
    y = functional.linear(attended, out)
    x = x + (y if attention_post_norm is None else REFERENCE.norm(y, attention_post_norm, spec.norm_eps))
    gate, up = functional.linear(REFERENCE.norm(x, mlp_norm, spec.norm_eps), gate_up).chunk(2, dim=-1)
    y = functional.linear(functional.silu(gate) * up, down)
    return x + (y if mlp_post_norm is None else REFERENCE.norm(y, mlp_post_norm, spec.norm_eps))


def row_scores(logits: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the most likely token of each row, and the probability of the token that was sampled."""
    probability = torch.exp(logits.gather(1, sampled[:, None])[:, 0] - torch.logsumexp(logits, dim=-1))
    return logits.argmax(-1), probability


def window_mask(positions: int, window: int, device: torch.device) -> Tensor:
    row = torch.arange(positions, device=device)
    distance = row[:, None] - row[None, :]
    return (distance >= 0) & (distance < window)


def load_target(name: str, *, dtype: torch.dtype, device: torch.device) -> Target:
    """Loads the weights alone: training needs neither tokenizer nor chat template."""
    resolved = resolve_model(name)
    checkpoint = open_checkpoint(resolved.path)
    spec = checkpoint.spec()
    _refuse_unsupported(spec)
    parameters = load_parameters(checkpoint, spec, dtype=dtype, device=device)
    return Target(spec, parameters, name=resolved.name, fingerprint=weights_fingerprint(resolved))


def _refuse_unsupported(spec: DecoderSpec) -> None:
    unsupported = {
        "mixtures of experts": any(layer.experts is not None for layer in spec.layers),
        "attention sinks": spec.sinks,
        "capped attention scores": spec.attention_softcap is not None,
        "capped logits": spec.logit_softcap is not None,
        "biases outside the qkv projection": spec.out_bias or spec.mlp_bias,
        f"the activation {spec.activation.value}": spec.activation.value != "silu",
    }
    found = [what for what, present in unsupported.items() if present]
    if found:
        raise ConfigError(f"drafters cannot be trained for a {spec.family} model yet: it has {', '.join(found)}")


def first_rope(spec: DecoderSpec) -> RopeSpec:
    """Returns the rotary embedding for a drafter: that of a full-attention layer if there is one."""
    layers: Sequence[LayerSpec] = [layer for layer in spec.layers if layer.window is None] or spec.layers
    return layers[0].rope


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
