"""Small random models for tests of the engine: every shape of decoder, no files."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from outrider.backends.reference.backend import ReferenceBackend
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.models.load import GenerationDefaults, LoadedModel
from outrider.models.parameters import DecoderParameters, DenseMLP, LayerParameters, Linear
from outrider.models.spec import DecoderSpec, LayerSpec, RopeSpec
from outrider.models.tokenizer import Tokenizer
from outrider.speculative.drafter import Drafter
from outrider.speculative.drafters.draft_model import draft_model_from
from outrider.speculative.settings import DrafterSettings

VOCABULARY = 256


@cache
def byte_tokenizer() -> Tokenizer:
    """One token per byte, spelt as byte-level tokenizers spell them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, source="bytes", eos_ids=())


def tiny_spec(*, windows: tuple[int | None, ...] = (None, None), **changes: Any) -> DecoderSpec:
    settings: dict[str, Any] = {
        "family": "tiny",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "max_position": 512,
        "layers": tuple(LayerSpec(window=window, rope=RopeSpec(rotary_dim=8)) for window in windows),
    }
    return DecoderSpec(**(settings | changes))


def tiny_model(spec: DecoderSpec | None = None, *, seed: int = 0, sharpness: float = 4.0) -> LoadedModel:
    """`sharpness` scales the head, so that the best token is well ahead of the others."""
    spec = spec or tiny_spec()
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale / shape[-1] ** 0.5

    hidden, inner = spec.hidden_size, spec.intermediate_size
    layers = tuple(
        LayerParameters(
            input_norm=torch.ones(hidden),
            qkv=Linear(weight=weight(spec.query_size + 2 * spec.kv_size, hidden, scale=2.0)),
            out=Linear(weight=weight(hidden, spec.query_size)),
            mlp_norm=torch.ones(hidden),
            mlp=DenseMLP(gate_up=Linear(weight=weight(2 * inner, hidden)), down=Linear(weight=weight(hidden, inner))),
        )
        for _ in spec.layers
    )
    parameters = DecoderParameters(
        embedding=weight(spec.vocab_size, hidden, scale=hidden**0.5),
        layers=layers,
        final_norm=torch.ones(hidden),
        head=Linear(weight=weight(spec.vocab_size, hidden, scale=sharpness)),
    )
    return LoadedModel(
        name=f"tiny-{seed}",
        spec=spec,
        parameters=parameters,
        tokenizer=byte_tokenizer(),
        chat_template=None,
        eos_ids=(),
        generation=GenerationDefaults(),
        fingerprint=f"tiny-{seed}-{spec}",
    )


def tiny_engine(
    model: LoadedModel | None = None,
    *,
    drafter: Drafter | None = None,
    k: int | None = 4,
    method: str = "ngram",
    draft_confidence: float | None = None,
    **settings: Any,
) -> Engine:
    """An engine over a tiny model with the sanitizer on; `drafter` or `method` with k > 0 turns speculation on, and
    without a k the engine chooses at each step."""
    defaults: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 1 << 22,
        "sanitizer": "raise",
        "sanitizer_level": "bytes",
        "backend": "reference",
        "device": "cpu",
    }
    if drafter is not None or settings.pop("speculate", False):
        fixed = SpeculativeConfig(method=method, num_speculative_tokens=k, draft_confidence=draft_confidence)
        settings.setdefault("speculative_config", fixed)
    return build_engine(EngineConfig(**(defaults | settings)), model=model or tiny_model(), drafter=drafter)


def first_layers(model: LoadedModel, count: int) -> LoadedModel:
    """The same model, cut off after `count` layers."""
    return replace(
        model,
        spec=replace(model.spec, layers=model.spec.layers[:count]),
        parameters=replace(model.parameters, layers=model.parameters.layers[:count]),
    )


def tiny_draft_model(target: LoadedModel, draft: LoadedModel, *, block_size: int = 16, max_len: int = 256) -> Drafter:
    settings = DrafterSettings(
        target=target,
        backend=ReferenceBackend(),
        page_tokens=block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=max_len,
    )
    return draft_model_from(draft, settings)
