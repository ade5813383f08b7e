"""The differences between decoders, as data. Torch-free.

A recipe turns a checkpoint's configuration into a `DecoderSpec`, which `models/decoder.py` runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.errors import ConfigError
from outrider.kv.checked import checked_fields, whole_number


class Activation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gate·σ(1.702·gate)·(up + 1), both clamped at 7."""


class RopeScaling(Enum):
    """How rotary frequencies are scaled for contexts longer than those of the first training."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Element i is paired with element i + rotary_dim / 2 (the Hugging Face convention)."""

    theta: float = 10_000.0
    rotary_dim: int
    """Number of leading elements of a head that are rotated; even."""
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    """LLAMA3 only."""
    high_freq_factor: float = 4.0
    """LLAMA3 only."""
    beta_fast: float = 32.0
    """YARN only."""
    beta_slow: float = 1.0
    """YARN only."""
    attention_factor: float = 1.0
    """YARN only: factor of cosines and sines."""
    truncate: bool = True
    """YARN only: whether the correction range is rounded to whole dimensions."""

    def __post_init__(self) -> None:
        whole_number(self.rotary_dim, "rotary_dim", at_least=2)
        if self.rotary_dim % 2:
            raise ConfigError(f"rotary_dim must be even, got {self.rotary_dim}")


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of one feed-forward network."""

    count: int
    per_token: int
    intermediate_size: int
    softmax_first: bool = True
    """Whether softmax is over all experts, before choosing; otherwise it is over the chosen ones."""
    normalise_chosen: bool = True
    """Whether the chosen experts' weights are scaled to a sum of 1 (only with softmax_first)."""

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "intermediate_size"):
            whole_number(getattr(self, name), f"experts: {name}", at_least=1)
        if self.per_token > self.count:
            raise ConfigError(f"{self.per_token} experts per token, but there are only {self.count}")


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    window: int | None = None
    """A query at p reads keys p - window + 1 … p; None reads all."""
    rope: RopeSpec
    experts: ExpertsSpec | None = None
    """Mixture of experts; None for a dense feed-forward network."""


@checked_fields()
@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer with RMS norms before, and optionally after, attention and feed-forward."""

    family: str
    """Name of the recipe, for messages only."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    norm_eps: float = 1e-5
    activation: Activation = Activation.SILU
    qk_norm: bool = False
    """Whether each head of queries and keys has an RMS norm, before rotation."""
    post_norms: bool = False
    """Whether the outputs of attention and feed-forward have a norm before they are added to the residual."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False
    """Whether there are attention sinks: a learned logit per head that takes part in the softmax without a value."""
    tied_head: bool = False
    query_scale: float = 0.0
    """Factor of the attention scores; 0 means head_dim ** -0.5."""
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "max_position"):
            whole_number(getattr(self, name), name, at_least=1)
        if not self.layers:
            raise ConfigError("a decoder needs at least one layer")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} query heads must be a multiple of {self.kv_heads} key/value heads")
        for number, layer in enumerate(self.layers):
            if layer.window is not None:
                whole_number(layer.window, f"layer {number}: window", at_least=1)
            if layer.rope.rotary_dim > self.head_dim:
                raise ConfigError(
                    f"layer {number}: rotary_dim {layer.rope.rotary_dim} exceeds head_dim {self.head_dim}"
                )

    @property
    def score_scale(self) -> float:
        return float(self.query_scale or self.head_dim**-0.5)

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim
