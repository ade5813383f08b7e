"""Random DFlash drafters for the tiny target, in both layouts, with what a reference must know of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.speculative.dense import Tensors, block_logits, target_layers
from torch import Tensor

from outrider.models.load import LoadedModel
from outrider.speculative.drafter import Drafter
from outrider.speculative.drafters.dflash import load_dflash
from outrider.speculative.settings import DrafterSettings

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 4, 2, 16, 40


BLOCK_SIZE = 5


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """A drafter, described the engine's way: taps are what leaves a layer."""

    layout: str
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)
    config: dict[str, Any] = field(default_factory=dict)
    """Further fields of its config.json, at the top."""
    inner: dict[str, Any] = field(default_factory=dict)
    """Further fields of its dflash_config (z-lab)."""
    taps: tuple[int, ...] = (0, 2)
    draft_vocab: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    prefix: str = ""
    fused: bool = False
    bias: bool = False
    mask: int = 5
    seed: int = 3

    method = "dflash"

    def save(self, directory: Path, target: LoadedModel) -> Path:
        tensors = block_tensors(self, target.spec.vocab_size)
        return save(directory, block_config(self, target), tensors, prefix=self.prefix, fused=self.fused)

    def load(self, directory: Path, target: LoadedModel, settings: DrafterSettings) -> Drafter:
        return load_dflash(str(self.save(directory, target)), settings)

    def logits(self, target: LoadedModel, tokens: Sequence[int], drafts: Sequence[int], limit: int) -> Tensor:
        """At each draft after `tokens`, the last of which is the anchor: [drafts, the target's vocabulary]."""
        tensors = block_tensors(self, target.spec.vocab_size)
        leaving = target_layers(target, tokens[:-1])
        context = torch.cat([leaving[tap] for tap in self.taps], dim=-1)
        embedding = tensors.get("embed_tokens.weight", target.parameters.embedding)
        head = tensors.get("lm_head.weight", target.parameters.head.weight)
        # However few drafts are wanted, a block has the rows that it was trained with, up to the drafter's limit.
        masks = min(max(len(drafts), BLOCK_SIZE - 1), limit - len(tokens))
        block = embedding[torch.tensor([tokens[-1]] + [self.mask] * masks)]
        logits = block_logits(tensors, context, block, head, self.visible, head_dim=HEAD_DIM)[: len(drafts)]
        return spread_logits(logits, tensors, target.spec.vocab_size)

    @property
    def anchored(self) -> bool:
        return self.layout == "speculators"

    def visible(self, layer: int, queries: Tensor, keys: Tensor, anchor: int) -> Tensor:
        """Which keys each query sees. Keys before the anchor are context, the others are the block's rows."""
        window, causal = self.windows[layer], self.causal[layer]
        seen = torch.ones(queries.shape[0], keys.shape[1], dtype=torch.bool)
        if causal:
            seen &= keys <= queries
        if window is None:
            return seen
        if self.anchored:
            return seen & ((keys >= anchor) | (keys >= anchor - window))
        seen &= queries - keys < window
        return seen & (keys - queries < window)


BLOCK_CASES = {
    "full": BlockCase(layout="z-lab"),
    "full, causal at the top": BlockCase(layout="z-lab", causal=(True, True), config={"is_causal": True}),
    "full, causal inside": BlockCase(layout="z-lab", causal=(True, True), inner={"causal": True}),
    "the top wins": BlockCase(layout="z-lab", config={"is_causal": False}, inner={"causal": True}),
    "sliding": BlockCase(layout="z-lab", windows=(6, 6), causal=(True, True)),
    "sliding, both ways": BlockCase(layout="z-lab", windows=(6, 6), config={"is_causal": False}),
    "tiny window, both ways": BlockCase(layout="z-lab", windows=(3, None), config={"is_causal": False}),
    "mixed": BlockCase(layout="z-lab", windows=(6, None), causal=(True, False)),
    "fused, prefixed, biased": BlockCase(layout="z-lab", prefix="model.", fused=True, bias=True),
    "speculators": BlockCase(layout="speculators"),
    "speculators, sliding": BlockCase(layout="speculators", windows=(6, None), causal=(True, False)),
    "speculators, sliding both ways": BlockCase(
        layout="speculators", windows=(6, 6), config={"sliding_window_non_causal": True}
    ),
    "speculators, own everything": BlockCase(
        layout="speculators", own_embedding=True, own_head=True, draft_vocab=100, taps=(1, 2)
    ),
}


def block_tensors(case: BlockCase, vocabulary: int) -> Tensors:
    """The tensors of a drafter, under the names of the z-lab layout."""
    generator = torch.Generator().manual_seed(case.seed)

    def weight(*shape: int, scale: float = 1.5) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale / shape[-1] ** 0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": weight(HIDDEN, HIDDEN * len(case.taps)),
        "hidden_norm.weight": norm(HIDDEN),
        "norm.weight": norm(HIDDEN),
    }
    for number in range(len(case.windows)):
        at = f"layers.{number}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(HIDDEN),
            f"{at}.post_attention_layernorm.weight": norm(HIDDEN),
            f"{at}.self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN, scale=3),
            f"{at}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN, scale=3),
            f"{at}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            f"{at}.self_attn.q_norm.weight": 2 * norm(HEAD_DIM),
            f"{at}.self_attn.k_norm.weight": 2 * norm(HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": weight(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": weight(INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": weight(HIDDEN, INNER),
        }
        if case.bias:
            for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                tensors[f"{at}.self_attn.{name}_proj.bias"] = weight(size * HEAD_DIM, scale=0.0)
            tensors[f"{at}.self_attn.o_proj.bias"] = weight(HIDDEN, scale=0.0)
    if case.own_embedding:
        tensors["embed_tokens.weight"] = weight(vocabulary, HIDDEN, scale=HIDDEN**0.5)
    if case.own_head:
        tensors["lm_head.weight"] = weight(case.draft_vocab or vocabulary, HIDDEN, scale=4)
    if case.draft_vocab is not None:
        tensors |= vocabulary_map(case.draft_vocab, vocabulary, generator)
    return tensors


def vocabulary_map(size: int, vocabulary: int, generator: torch.Generator) -> Tensors:
    """The tokens of the target that can be drafted."""
    chosen = torch.randperm(vocabulary, generator=generator)[:size].sort().values
    marks = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, chosen, True)
    return {"d2t": chosen - torch.arange(size), "t2d": marks}


def spread_logits(logits: Tensor, tensors: Tensors, vocabulary: int) -> Tensor:
    if "d2t" not in tensors:
        return logits
    spread = torch.full((len(logits), vocabulary), float("-inf"))
    spread[:, tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = logits
    return spread


def body_config(case: BlockCase, vocabulary: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": len(case.windows),
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attention_bias": case.bias,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in case.windows],
    }
    widths = {window for window in case.windows if window is not None}
    return config | ({"sliding_window": widths.pop()} if widths else {})


def block_config(case: BlockCase, target: LoadedModel) -> dict[str, Any]:
    body = body_config(case, target.spec.vocab_size)
    if case.layout == "z-lab":
        inner = {"mask_token_id": case.mask, "target_layer_ids": list(case.taps)} | case.inner
        return {
            "architectures": ["DFlashDraftModel"],
            "block_size": BLOCK_SIZE,
            "num_target_layers": len(target.spec.layers),
            "dflash_config": inner,
            **body,
            **case.config,
        }
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": body,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in case.taps],
        "mask_token_id": case.mask,
        "block_size": BLOCK_SIZE,
        "draft_vocab_size": case.draft_vocab or target.spec.vocab_size,
        "speculators_config": {"verifier": {"name_or_path": "tiny"}},
        **case.config,
    }


def save(directory: Path, config: dict[str, Any], tensors: Tensors, *, prefix: str = "", fused: bool = False) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(tensors)
    if fused:
        layers = {name.split(".self_attn.")[0] for name in tensors if ".self_attn." in name}
        for layer in layers:
            for kind in ("weight", "bias"):
                names = [f"{layer}.self_attn.{part}_proj.{kind}" for part in "qkv"]
                if names[0] in tensors:
                    tensors[f"{layer}.self_attn.qkv_proj.{kind}"] = torch.cat([tensors.pop(name) for name in names])
    stored = {f"{prefix}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(stored, directory / "model.safetensors")
    return directory
