"""Random EAGLE drafters and MTP modules for the tiny target, in every layout, with their references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tests.speculative.block_cases import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, save, spread_logits, vocabulary_map
from tests.speculative.dense import AheadReference, FirstReference, ModuleReference, Tensors, ThirdReference
from torch import Tensor

from outrider.models.load import LoadedModel
from outrider.speculative.drafter import Drafter
from outrider.speculative.drafters.eagle import load_eagle
from outrider.speculative.drafters.mtp import load_mtp
from outrider.speculative.settings import DrafterSettings


class Weights:
    """Random tensors in a fixed order."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, scale: float = 1.5) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * scale / shape[-1] ** 0.5

    def norm(self, size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self.generator)

    def layer(self, at: str, *, width: int, head_dim: int, inner: int = INNER, qk_norm: bool = False) -> Tensors:
        tensors = {
            f"{at}.input_layernorm.weight": self.norm(HIDDEN),
            f"{at}.post_attention_layernorm.weight": self.norm(HIDDEN),
            f"{at}.self_attn.q_proj.weight": self.matrix(HEADS * head_dim, width, scale=3),
            f"{at}.self_attn.k_proj.weight": self.matrix(KV_HEADS * head_dim, width, scale=3),
            f"{at}.self_attn.v_proj.weight": self.matrix(KV_HEADS * head_dim, width),
            f"{at}.self_attn.o_proj.weight": self.matrix(HIDDEN, HEADS * head_dim),
            f"{at}.mlp.gate_proj.weight": self.matrix(inner, HIDDEN),
            f"{at}.mlp.up_proj.weight": self.matrix(inner, HIDDEN),
            f"{at}.mlp.down_proj.weight": self.matrix(HIDDEN, inner),
        }
        if qk_norm:
            for name in "qk":
                tensors[f"{at}.self_attn.{name}_norm.weight"] = 2 * self.norm(head_dim)
        return tensors


def llama_config(vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        **more,
    }


@dataclass(frozen=True, kw_only=True)
class FirstCase:
    """EAGLE-1, as its authors store it."""

    method = "eagle"
    bias: bool = True
    own_embedding: bool = True
    seed: int = 11

    def tensors(self, target: LoadedModel) -> Tensors:
        weights, vocabulary = Weights(self.seed), target.spec.vocab_size
        tensors = weights.layer("layers.0", width=HIDDEN, head_dim=HEAD_DIM)
        del tensors["layers.0.input_layernorm.weight"]
        tensors["fc.weight"] = weights.matrix(HIDDEN, 2 * HIDDEN)
        if self.bias:
            tensors["fc.bias"] = weights.matrix(HIDDEN)
        if self.own_embedding:
            tensors["embed_tokens.weight"] = weights.matrix(vocabulary, HIDDEN, scale=HIDDEN**0.5)
        return tensors

    def config(self, target: LoadedModel) -> dict[str, Any]:
        return {"architectures": ["LlamaForCausalLM"], **llama_config(target.spec.vocab_size)}

    def save(self, directory: Path, target: LoadedModel) -> Path:
        return save(directory, self.config(target), self.tensors(target))

    def load(self, directory: Path, target: LoadedModel, settings: DrafterSettings) -> Drafter:
        return load_eagle(str(self.save(directory, target)), settings, version=1)

    def logits(self, target: LoadedModel, tokens: Sequence[int], drafts: Sequence[int], limit: int) -> Tensor:
        reference = FirstReference(self.tensors(target), target, layer="layers.0", head_dim=HEAD_DIM)
        return reference.logits(tokens, drafts)


@dataclass(frozen=True, kw_only=True)
class ThirdCase:
    """EAGLE-3 in its authors' layout or in that of speculators. Taps are what leaves a layer."""

    method = "eagle3"
    layout: str
    taps: tuple[int, ...] = (0, 1, 2)
    model_type: str = "llama"
    normed_residual: bool = False
    taps_norm: bool = False
    draft_vocab: int | None = 100
    own_embedding: bool = False
    fused: bool = False
    says_ids: bool = True
    seed: int = 12
    more: dict[str, Any] = field(default_factory=dict)

    def tensors(self, target: LoadedModel) -> Tensors:
        weights, vocabulary = Weights(self.seed), target.spec.vocab_size
        tensors = weights.layer("layers.0", width=2 * HIDDEN, head_dim=HEAD_DIM, qk_norm=self.model_type == "qwen3")
        tensors |= {
            "layers.0.hidden_norm.weight": weights.norm(HIDDEN),
            "fc.weight": weights.matrix(HIDDEN, len(self.taps) * HIDDEN),
            "norm.weight": weights.norm(HIDDEN),
            "lm_head.weight": weights.matrix(self.draft_vocab or vocabulary, HIDDEN, scale=4),
        }
        if self.taps_norm:
            tensors["input_norm.weight"] = weights.norm(len(self.taps) * HIDDEN)
        if self.own_embedding:
            tensors["embed_tokens.weight"] = weights.matrix(vocabulary, HIDDEN, scale=HIDDEN**0.5)
        if self.draft_vocab is not None:
            tensors |= vocabulary_map(self.draft_vocab, vocabulary, weights.generator)
        return tensors

    def config(self, target: LoadedModel) -> dict[str, Any]:
        vocabulary = target.spec.vocab_size
        body = llama_config(vocabulary, model_type=self.model_type)
        ids = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in self.taps]} if self.says_ids else {}
        shared = {
            "draft_vocab_size": self.draft_vocab or vocabulary,
            "norm_before_residual": self.normed_residual,
            "norm_before_fc": self.taps_norm,
            **self.more,
        }
        if self.layout == "speculators":
            return {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "transformer_layer_config": body,
                **ids,
                **shared,
            }
        return {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": ids, **body, **shared}

    def save(self, directory: Path, target: LoadedModel) -> Path:
        tensors = self.tensors(target)
        if self.layout != "speculators":
            tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        return save(directory, self.config(target), tensors, fused=self.fused)

    def load(self, directory: Path, target: LoadedModel, settings: DrafterSettings) -> Drafter:
        return load_eagle(str(self.save(directory, target)), settings, version=3)

    def logits(self, target: LoadedModel, tokens: Sequence[int], drafts: Sequence[int], limit: int) -> Tensor:
        tensors = self.tensors(target)
        reference = ThirdReference(tensors, target, layer="layers.0", head_dim=HEAD_DIM)
        reference.taps, reference.normed_residual = self.taps, self.normed_residual
        return spread_logits(reference.logits(tokens, drafts), tensors, target.spec.vocab_size)


@dataclass(frozen=True, kw_only=True)
class ModuleCase:
    """MTP, inside the target's checkpoint."""

    method = "mtp"
    layout: str
    seed: int = 13

    def names(self, target: LoadedModel) -> tuple[str, str, str, str]:
        """Join, norm of the embedding, norm of the features, last norm."""
        if self.layout == "qwen":
            return (
                "mtp.fc.weight",
                "mtp.pre_fc_norm_embedding.weight",
                "mtp.pre_fc_norm_hidden.weight",
                "mtp.norm.weight",
            )
        at = f"model.layers.{len(target.spec.layers)}"
        return f"{at}.eh_proj.weight", f"{at}.enorm.weight", f"{at}.hnorm.weight", f"{at}.shared_head.norm.weight"

    def layer(self, target: LoadedModel) -> str:
        return "mtp.layers.0" if self.layout == "qwen" else f"model.layers.{len(target.spec.layers)}"

    def tensors(self, target: LoadedModel) -> Tensors:
        weights, spec = Weights(self.seed), target.spec
        tensors = weights.layer(
            self.layer(target), width=HIDDEN, head_dim=spec.head_dim, inner=spec.intermediate_size, qk_norm=spec.qk_norm
        )
        join, embedding_norm, feature_norm, last_norm = self.names(target)
        tensors |= {
            join: weights.matrix(HIDDEN, 2 * HIDDEN),
            embedding_norm: weights.norm(HIDDEN),
            feature_norm: weights.norm(HIDDEN),
            last_norm: weights.norm(HIDDEN),
        }
        if self.layout != "qwen":
            tensors[f"{self.layer(target)}.embed_tokens.weight"] = target.parameters.embedding
            tensors[f"{self.layer(target)}.shared_head.head.weight"] = target.parameters.head.weight
        return tensors

    def config(self, target: LoadedModel) -> dict[str, Any]:
        return {"architectures": ["LlamaForCausalLM"], "num_nextn_predict_layers": 1}

    def save(self, directory: Path, target: LoadedModel) -> Path:
        return save(directory, self.config(target), self.tensors(target))

    def load(self, directory: Path, target: LoadedModel, settings: DrafterSettings) -> Drafter:
        loaded = replace(settings.target, path=self.save(directory, target))
        return load_mtp(replace(settings, target=loaded))

    def logits(self, target: LoadedModel, tokens: Sequence[int], drafts: Sequence[int], limit: int) -> Tensor:
        spec = target.spec
        reference: AheadReference = ModuleReference(
            self.tensors(target), target, layer=self.layer(target), head_dim=spec.head_dim, eps=spec.norm_eps
        )
        assert isinstance(reference, ModuleReference)
        reference.embedding, reference.names = target.parameters.embedding, self.names(target)
        reference.carries_normed = self.layout == "qwen"
        return reference.logits(tokens, drafts)


AHEAD_CASES: dict[str, FirstCase | ThirdCase | ModuleCase] = {
    "eagle": FirstCase(),
    "eagle, target's embedding": FirstCase(own_embedding=False, bias=False),
    "eagle3": ThirdCase(layout="original"),
    "eagle3, two taps, whole vocabulary": ThirdCase(layout="original", taps=(2, 0), draft_vocab=None, fused=True),
    "eagle3, speculators": ThirdCase(layout="speculators", own_embedding=True),
    "eagle3, speculators, norms": ThirdCase(
        layout="speculators", model_type="qwen3", normed_residual=True, taps_norm=True
    ),
    "mtp, deepseek": ModuleCase(layout="deepseek"),
    "mtp, qwen": ModuleCase(layout="qwen"),
}
