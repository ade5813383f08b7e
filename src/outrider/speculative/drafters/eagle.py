"""EAGLE: one layer ahead of the target. Version 1 joins embedding and features; version 3 attends over both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.layers.ops import Ops
from outrider.models.parameters import Linear, Matrix
from outrider.speculative.drafters.ahead import AheadNetwork, Entrance, OneLayerAhead
from outrider.speculative.settings import DrafterSettings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WideEntrance(Entrance):
    """Version 3: queries, keys and values are made from embedding and features side by side, each normed."""

    fuse: Linear
    """Taps side by side to one hidden state: [hidden, taps * hidden]."""
    taps_norm: Tensor | None
    """Over all taps, before they are fused."""
    embedding_norm: Tensor
    feature_norm: Tensor
    normed_residual: bool
    """The residual is the normed features, not the features."""
    eps: float

    def mapped(self, change: Callable[[Matrix], Matrix]) -> Entrance:
        return replace(self, fuse=self.fuse.mapped(change))

    def features(self, taps: Tensor, ops: Ops) -> Tensor:
        if self.taps_norm is not None:
            taps = ops.norm(taps, self.taps_norm, self.eps)
        return ops.project(taps, self.fuse)

    def enter(self, embedded: Tensor, features: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        normed = ops.norm(features, self.feature_norm, self.eps)
        wide = torch.cat([ops.norm(embedded, self.embedding_norm, self.eps), normed], dim=1)
        return wide, (normed if self.normed_residual else features)


class Eagle(OneLayerAhead):
    def __init__(self, network: AheadNetwork, settings: DrafterSettings, *, name: str, fingerprint: str) -> None:
        super().__init__(network, settings, method="eagle", name=name, fingerprint=fingerprint)
