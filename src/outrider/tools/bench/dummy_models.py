"""Tokens per second of models with random weights in the shapes of real ones, and with drafts that are as often right
as one wishes: `scripts/bench-gpu --model smollm2-135m --batch 1,32 --drafter DIRECTORY`

What a step costs does not depend on the weights, so this needs no checkpoint of the target. Only the number of accepted
drafts does: a real drafter does all its work here, and its drafts are then replaced by the tokens that a run without
drafts has written, each right with the given probability if those before it are.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.backends.registry import select_backend
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.models.load import LoadedModel
from outrider.models.parameters import DecoderParameters, DenseMLP, LayerParameters, Linear
from outrider.models.spec import DecoderSpec, LayerSpec, RopeSpec
from outrider.models.text import GenerationDefaults
from outrider.speculative.drafter import Drafter, DraftServices, FeedRow, ProposeRow
from outrider.speculative.registry import load_drafter
from outrider.speculative.settings import DrafterSettings
from outrider.tools.bench.contestants import OutriderContestant, Run
from outrider.tools.bench.random_models import byte_tokenizer
from outrider.tools.number_lists import whole_numbers


class Shape(NamedTuple):
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    theta: float
    qk_norm: bool


SHAPES = {
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49_152, 1e5, qk_norm=False),
    "qwen3-8b": Shape(36, 4096, 12_288, 32, 8, 128, 151_936, 1e6, qk_norm=True),
}
MAX_POSITION = 8192
QUIET = 0.02
"""The scale of what layers add to the residual stream."""
FIRST = 8
"""The number of tokens by which a prompt is known."""


def dummy_model(name: str, *, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Returns a model of a real one's shape with random weights."""
    of = SHAPES[name]
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)
        return drawn.mul_(scale * columns**-0.5)

    def linear(rows: int, columns: int, scale: float = 1.0) -> Linear:
        return Linear(weight=matrix(rows, columns, scale))

    def ones(width: int) -> Tensor:
        return torch.ones(width, device=device, dtype=dtype)

    rope = RopeSpec(rotary_dim=of.head_dim, theta=of.theta)
    spec = DecoderSpec(
        family=name,
        vocab_size=of.vocabulary,
        hidden_size=of.hidden,
        intermediate_size=of.inner,
        heads=of.heads,
        kv_heads=of.kv_heads,
        head_dim=of.head_dim,
        qk_norm=of.qk_norm,
        max_position=MAX_POSITION,
        layers=(LayerSpec(rope=rope),) * of.layers,
    )
    layers = tuple(
        LayerParameters(
            input_norm=ones(of.hidden),
            qkv=linear(spec.query_size + 2 * spec.kv_size, of.hidden),
            out=linear(of.hidden, spec.query_size, QUIET),
            mlp_norm=ones(of.hidden),
            mlp=DenseMLP(gate_up=linear(2 * of.inner, of.hidden), down=linear(of.hidden, of.inner, QUIET)),
            q_norm=ones(of.head_dim) if of.qk_norm else None,
            k_norm=ones(of.head_dim) if of.qk_norm else None,
        )
        for _ in range(of.layers)
    )
    embedding = matrix(of.vocabulary, of.hidden, of.hidden**0.5)
    # Layers add little to the residual stream, and a token is followed by the one whose row of the head is its own
    # embedding: far ahead of all others, so that no rounding makes two runs part.
    after = torch.randperm(of.vocabulary, generator=generator, device=device)
    head = Linear(weight=embedding[after] * of.hidden**-0.5)
    return LoadedModel(
        name=name,
        spec=spec,
        parameters=DecoderParameters(embedding=embedding, layers=layers, final_norm=ones(of.hidden), head=head),
        tokenizer=byte_tokenizer(),
        chat_template=None,
        eos_ids=(),
        generation=GenerationDefaults(),
        dtype=dtype,
        fingerprint=f"dummy {name}",
    )


class PromisedDrafts(Drafter):
    """A drafter whose drafts are replaced, after all its work, by ones that are right with a given probability."""

    def __init__(self, inner: Drafter, right: float) -> None:
        self.footprint, self.layer_groups, self.default_k = inner.footprint, inner.layer_groups, inner.default_k
        self.texts: Mapping[tuple[int, ...], Sequence[int]] = {}
        """By their first tokens: prompts with what follows without drafts."""
        self._inner = inner
        self._right = right
        self._random = random.Random(0)

    def bind(self, services: DraftServices) -> None:
        self._inner.bind(services)

    def step(self, feeds: Sequence[FeedRow], taps: Tensor, proposals: Sequence[ProposeRow]) -> list[list[int]]:
        found = self._inner.step(feeds, taps, proposals)
        handed = []
        for row, drafts in zip(proposals, found, strict=True):
            assert isinstance(drafts, list)
            text = self.texts.get(tuple(row.request.tokens[:FIRST]), ())
            right = list(text[row.v + 1 : row.v + 1 + len(drafts)])
            count = 0
            while count < len(right) and self._random.random() < self._right:
                count += 1
            handed.append([*right[:count], *drafts[count:]])
        return handed

    def forget(self, request_id: str) -> None:
        self._inner.forget(request_id)


def main() -> None:
    given = _arguments()
    device, batches = torch.device(given.device), whole_numbers(given.batch, "--batch")
    model = dummy_model(given.model, dtype=getattr(torch, given.dtype), device=device)
    settings: dict[str, Any] = {
        "device": given.device,
        "dtype": given.dtype,
        "backend": given.backend,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 8192,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
    }
    if given.kv_gib:
        settings["kv_cache_memory_bytes"] = given.kv_gib << 30
    engines: dict[str, tuple[Engine, PromisedDrafts | None]] = {
        "plain": (build_engine(EngineConfig(**settings), model=model), None)
    }
    drafts = [*whole_numbers(given.k, "--k"), *([0] if given.auto else [])]
    for k in drafts if given.drafter else ():
        speculation = SpeculativeConfig(
            method="dflash", model=given.drafter, num_speculative_tokens=k or None, draft_vocab_size=None
        )
        drafter = PromisedDrafts(_drafter(speculation, model, given.backend, device), given.right)
        config = EngineConfig(**settings, speculative_config=speculation)
        engines[f"dflash k={k or 'auto'}"] = build_engine(config, model=model, drafter=drafter), drafter
    numbers = random.Random(1)
    for batch in batches:
        prompts = [[numbers.randrange(model.spec.vocab_size) for _ in range(given.prompt_tokens)] for _ in range(batch)]
        texts: dict[tuple[int, ...], list[int]] = {}
        for name, (engine, promised) in engines.items():
            contestant = OutriderContestant(name, engine, speculate=promised is not None)
            runs = []
            for _ in range(given.rounds + 1):
                if promised is not None:
                    promised.texts = texts
                runs.append(contestant.run(prompts, given.tokens))
            if promised is None:
                whole = [[*prompt, *text] for prompt, text in zip(prompts, runs[-1].tokens, strict=True)]
                texts = {tuple(text[:FIRST]): text for text in whole}
            print(json.dumps({"batch": batch, "engine": name} | _figures(runs[1:], engine)), flush=True)


def _figures(runs: Sequence[Run], engine: Engine) -> dict[str, Any]:
    graphs = getattr(engine.runner.backend, "graphs", None)
    steps = sorted(seconds for run in runs for seconds in run.steps_s)
    figures: dict[str, Any] = {
        "tokens_per_s": round(median(run.tokens_per_s for run in runs), 1),
        "of_rounds": [round(run.tokens_per_s, 1) for run in runs],
        "step_us": round(1e6 * median(steps), 1),
        "prompt_ms": round(1e3 * median(run.prompt_s for run in runs), 2),
        "tokens_per_step": round(median(run.tokens_per_step for run in runs), 3),
    }
    if graphs is not None:
        counts = graphs.counts
        figures["graphs"] = {
            "captured": counts.captured,
            "replayed": counts.replayed,
            "eager": sum(counts.eager.values()),
            "bytes": counts.bytes,
            "seconds": round(counts.seconds, 2),
        }
    return figures


def _drafter(speculation: SpeculativeConfig, model: LoadedModel, backend: str, device: torch.device) -> Drafter:
    settings = DrafterSettings(
        target=model,
        backend=select_backend(backend, device=device),
        page_tokens=16,
        dtype=model.dtype,
        device=device,
        max_model_len=2048,
        most_drafts=speculation.num_speculative_tokens,
    )
    return load_drafter(speculation, settings)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", default="1,32,256")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gib", type=int, default=8, help="memory for the KV of each engine; 0: what is free")
    parser.add_argument("--drafter", help="directory of a DFlash checkpoint that fits the model")
    parser.add_argument("--k", default="7", help="fixed numbers of drafts")
    parser.add_argument("--auto", action="store_true", help="also let the engine choose how much is drafted")
    parser.add_argument("--right", type=float, default=0.8, help="probability that a draft is right")
    return parser.parse_args()


if __name__ == "__main__":
    main()
