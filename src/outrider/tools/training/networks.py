"""The drafters' networks in training: dense and differentiable, with all anchors of a stream at once.

Modules have the names of public checkpoints, so that `state_dict` can be exported as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from outrider.models.rope import rotary_table
from outrider.models.spec import DecoderSpec
from outrider.tools.training.attention import BlockLayout, attend, rotate_rows
from outrider.tools.training.target import first_rope

INITIAL_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkShape:
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    layers: int
    taps: int

    @classmethod
    def like(cls, spec: DecoderSpec, *, layers: int, taps: int) -> NetworkShape:
        """Returns a shape as wide as the target, whose embeddings and head the drafter uses."""
        return cls(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            norm_eps=spec.norm_eps,
            layers=layers,
            taps=taps,
        )


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """The projections of attention; the layer decides which rows attend to which."""

    def __init__(self, shape: NetworkShape, *, input_size: int, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        if qk_norm:
            self.q_norm: nn.Module = RMSNorm(shape.head_dim, shape.norm_eps)
            self.k_norm: nn.Module = RMSNorm(shape.head_dim, shape.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def queries(self, x: Tensor, table: Tensor) -> Tensor:
        return rotate_rows(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), table)

    def keys(self, x: Tensor, table: Tensor) -> Tensor:
        return rotate_rows(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), table)

    def values(self, x: Tensor) -> Tensor:
        return self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # type: ignore[no-any-return]


class DraftNetwork(nn.Module, ABC):
    """Maps the target's taps and the tokens of a stream to the rows from which the head makes drafts."""

    k: int
    """Most drafts per anchor."""
    block_size: int | None
    """Number of rows of a block, which attend to each other; None if the network has no blocks."""

    rotary: Tensor
    norm: RMSNorm

    def __init__(self, spec: DecoderSpec, shape: NetworkShape, *, length: int, positions_past_end: int) -> None:
        super().__init__()
        self.shape = shape
        positions = length + positions_past_end
        table = rotary_table(first_rope(spec), positions, dtype=torch.float32, device=torch.device("cpu"))
        self.register_buffer("rotary", table, persistent=False)

    @abstractmethod
    def forward(
        self, taps: Tensor, embedded: Tensor, anchors: Tensor, mask: Tensor | BlockMask | None, k: int
    ) -> Tensor:
        """Returns the rows of all drafts, [streams, anchors, k, hidden].

        `taps` is [streams, length, taps * hidden]; `embedded`, [streams, length, hidden], holds the stream's tokens
        embedded by the target; `mask` says what the rows of blocks see, and is None if `block_size` is.
        """

    def start_norm_from(self, target_norm: Tensor) -> None:
        """Starts the last norm from the target's, whose scale the head expects.

        At half its size, so that untrained rows do not give confident predictions.
        """
        self.norm.weight.data.copy_(0.5 * target_norm.float().cpu())

    def initialise_on(self, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)
        depth = 2 * self.shape.layers
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = INITIAL_STD / depth**0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else INITIAL_STD
            parameter.data.normal_(0.0, std, generator=generator)


class DFlashLayer(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape, input_size=shape.hidden_size, qk_norm=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, context: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor | BlockMask) -> Tensor:
        at_context, at_rows = tables
        normed = self.input_layernorm(x)
        attention = self.self_attn
        keys = torch.cat([attention.keys(context, at_context), attention.keys(normed, at_rows)], dim=1)
        values = torch.cat([attention.values(context), attention.values(normed)], dim=1)
        attended = attend(attention.queries(normed, at_rows), keys, values, mask)
        x = x + attention.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class DFlashNetwork(DraftNetwork):
    """One pass drafts a block: the anchor and k mask rows, over keys and values of the tapped context."""

    mask_row: Tensor

    def __init__(
        self, spec: DecoderSpec, shape: NetworkShape, *, length: int, block_size: int, mask_row: Tensor
    ) -> None:
        """`mask_row` is the mask token, embedded by the target."""
        super().__init__(spec, shape, length=length, positions_past_end=block_size)
        self.register_buffer("mask_row", mask_row, persistent=False)
        self.k = block_size - 1
        self.block_size = block_size
        self.fc = nn.Linear(shape.taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, taps: Tensor, embedded: Tensor, anchors: Tensor, mask: Tensor | BlockMask | None, k: int
    ) -> Tensor:
        assert mask is not None
        size = k + 1
        context = self.hidden_norm(self.fc(taps))
        first = rows_at(embedded, anchors)[:, :, None]
        masks = self.mask_row.to(embedded.dtype).expand(*anchors.shape, k, -1)
        block = torch.cat([first, masks], dim=2)
        positions = anchors[..., None] + torch.arange(size, device=anchors.device)
        tables = self.rotary[: taps.shape[1]], self.rotary[positions.flatten(1)]
        x = block.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, context, tables, mask)
        return self.norm(x).unflatten(1, (-1, size))[:, :, 1:]  # type: ignore[no-any-return]


class Eagle3Layer(nn.Module):
    """A layer whose attention reads embedding and feature side by side; only the feature stays in the residual."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape, input_size=2 * shape.hidden_size, qk_norm=False)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def inputs(self, embedded: Tensor, feature: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        x = feature + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Eagle3Network(DraftNetwork):
    """One layer applied k times. The row of position p holds the token at p + 1 and the target's feature at p.

    step 0   keys of every p < anchor; the row at anchor - 1 drafts anchor + 1
    step t   feature: the layer's own output of step t - 1; token: the one at anchor + t; keys: as in step 0,
             and the rows that this anchor made in steps 1 … t
    """

    def __init__(self, spec: DecoderSpec, shape: NetworkShape, *, length: int, steps: int) -> None:
        super().__init__(spec, shape, length=length, positions_past_end=steps)
        self.k = steps
        self.block_size = None
        self.scale = shape.head_dim**-0.5
        self.fc = nn.Linear(shape.taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, taps: Tensor, embedded: Tensor, anchors: Tensor, mask: Tensor | BlockMask | None, k: int
    ) -> Tensor:
        assert mask is None
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        features = self.fc(taps)
        # The last position has no next token, and no anchor comes after it.
        shifted = torch.cat([embedded[:, 1:], embedded[:, -1:]], dim=1)
        inputs = layer.inputs(shifted, features)
        length = taps.shape[1]
        keys = layer.self_attn.keys(inputs, self.rotary[:length])
        values = layer.self_attn.values(inputs)
        base = anchors - 1
        feature = rows_at(features, base)
        unseen = torch.arange(length, device=anchors.device) > base[..., None]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs = []
        for step in range(k):
            # Rows past the end of the stream have no label.
            row = layer.inputs(rows_at(embedded, (anchors + step).clamp(max=length - 1)), feature)
            table = self.rotary[base + step]
            if step:
                own_keys.append(layer.self_attn.keys(row, table))
                own_values.append(layer.self_attn.values(row))
            query = layer.self_attn.queries(row, table)
            feature = layer.finish(feature, self._attend(query, (keys, values), unseen, own_keys, own_values))
            outputs.append(self.norm(feature))
        return torch.stack(outputs, dim=2)

    def _attend(
        self,
        q: Tensor,
        context: tuple[Tensor, Tensor],
        unseen: Tensor,
        own_keys: list[Tensor],
        own_values: list[Tensor],
    ) -> Tensor:
        """Attends from q, [streams, anchors, heads, dim], to the context before each anchor and to its own rows."""
        keys, values = context
        grouped = q.unflatten(2, (keys.shape[2], -1)) * self.scale
        scores = torch.einsum("bagrd,bsgd->bgras", grouped, keys).float()
        scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
        if own_keys:
            own = torch.einsum("bagrd,batgd->bgrat", grouped, torch.stack(own_keys, dim=2)).float()
            scores = torch.cat([scores, own], dim=-1)
        weights = torch.softmax(scores, dim=-1).to(values.dtype)
        length = keys.shape[1]
        out = torch.einsum("bgras,bsgd->bagrd", weights[..., :length], values)
        if own_values:
            out = out + torch.einsum("bgrat,batgd->bagrd", weights[..., length:], torch.stack(own_values, dim=2))
        return out.flatten(2)


def rows_at(values: Tensor, positions: Tensor) -> Tensor:
    """Gathers rows: [streams, length, size] at [streams, n] gives [streams, n, size]."""
    return values.gather(1, positions[..., None].expand(-1, -1, values.shape[-1]))


def block_layout(network: DraftNetwork, *, length: int, anchors: int, k: int, causal: bool) -> BlockLayout | None:
    if network.block_size is None:
        return None
    return BlockLayout(length=length, anchors=anchors, block_size=k + 1, causal=causal)
