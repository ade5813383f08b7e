"""Small random models and drafters of every kind, made in memory, for measurements that need no real text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from outrider.models.load import LoadedModel
from outrider.models.parameters import DecoderParameters, DenseMLP, LayerParameters, Linear
from outrider.models.spec import DecoderSpec, LayerSpec, RopeSpec
from outrider.models.text import GenerationDefaults
from outrider.models.tokenizer import Tokenizer
from outrider.speculative.drafter import Drafter, DraftServices, FeedRow, Proposal, ProposeRow
from outrider.speculative.drafters.ahead import AheadNetwork, JoinedEntrance, OneLayerAhead
from outrider.speculative.drafters.dflash import DFlash, DFlashParameters, DFlashSpec
from outrider.speculative.drafters.draft_model import draft_model_from
from outrider.speculative.drafters.eagle import WideEntrance
from outrider.speculative.drafters.mtp import Mtp
from outrider.speculative.drafters.ngram import NgramDrafter
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary

VOCABULARY = 256
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
BLOCK_ROWS = 5
MASK_TOKEN = 5
DRAFTER_WINDOW = 24
Windows = Sequence[int | None]


class Weights:
    """Random tensors, drawn in a fixed order."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self._generator).mul_(scale / shape[-1] ** 0.5)

    def linear(self, rows: int, columns: int, scale: float = 1.0) -> Linear:
        return Linear(weight=self.matrix(rows, columns, scale=scale))

    def layers(self, spec: DecoderSpec, *, width: int) -> tuple[LayerParameters, ...]:
        """Returns random layers; `width` is the number of inputs of their query, key and value projections."""
        norms = {"q_norm": torch.ones(HEAD_DIM), "k_norm": torch.ones(HEAD_DIM)} if spec.qk_norm else {}
        return tuple(
            LayerParameters(
                input_norm=torch.ones(HIDDEN),
                qkv=self.linear(spec.query_size + 2 * spec.kv_size, width, scale=2.0),
                out=self.linear(HIDDEN, spec.query_size),
                mlp_norm=torch.ones(HIDDEN),
                mlp=DenseMLP(gate_up=self.linear(2 * INNER, HIDDEN), down=self.linear(HIDDEN, INNER)),
                **norms,
            )
            for _layer in spec.layers
        )

    def decoder(self, spec: DecoderSpec, *, width: int = HIDDEN) -> DecoderParameters:
        return DecoderParameters(
            embedding=self.matrix(VOCABULARY, HIDDEN, scale=HIDDEN**0.5),
            layers=self.layers(spec, width=width),
            final_norm=torch.ones(HIDDEN),
            # A large scale makes the best token's logit stand out.
            head=self.linear(VOCABULARY, HIDDEN, scale=4.0),
        )


def _spec(windows: Windows, max_position: int, **changes: Any) -> DecoderSpec:
    return DecoderSpec(
        family="random",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position=max_position,
        layers=tuple(LayerSpec(window=window, rope=RopeSpec(rotary_dim=HEAD_DIM)) for window in windows),
        **changes,
    )


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, source="bytes", eos_ids=())


def random_model(name: str, windows: Windows, *, max_position: int, seed: int = 1) -> LoadedModel:
    spec = _spec(windows, max_position)
    return LoadedModel(
        name=name,
        spec=spec,
        parameters=Weights(seed).decoder(spec),
        tokenizer=byte_tokenizer(),
        chat_template=None,
        eos_ids=(),
        generation=GenerationDefaults(),
        fingerprint=f"random {name} {seed} {spec}",
    )


# ---- drafters ----------------------------------------------------------------------------------------


def _own(target: LoadedModel, weights: Weights, spec: DecoderSpec, *, width: int = HIDDEN) -> DecoderParameters:
    """Returns random layers for a drafter that uses the target's embedding and head."""
    return replace(
        weights.decoder(spec, width=width), embedding=target.parameters.embedding, head=target.parameters.head
    )


def _one_layer(target: LoadedModel, window: int | None) -> DecoderSpec:
    return _spec((window,), target.spec.max_position)


def _joined(settings: DrafterSettings, weights: Weights, window: int | None) -> AheadNetwork:
    target = settings.target
    body = _one_layer(target, window)
    entrance = JoinedEntrance(
        join=weights.linear(HIDDEN, 2 * HIDDEN),
        target_norm=target.parameters.final_norm,
        target_eps=target.spec.norm_eps,
        eps=body.norm_eps,
    )
    return AheadNetwork(
        body=body,
        parameters=_own(target, weights, body),
        entrance=entrance,
        taps=(len(target.spec.layers) - 1,),
        vocabulary=DraftVocabulary(size=VOCABULARY),
    )


def _wide(settings: DrafterSettings, weights: Weights) -> AheadNetwork:
    target = settings.target
    body, last = _one_layer(target, None), len(target.spec.layers) - 1
    entrance = WideEntrance(
        fuse=weights.linear(HIDDEN, 3 * HIDDEN),
        taps_norm=None,
        embedding_norm=torch.ones(HIDDEN),
        feature_norm=torch.ones(HIDDEN),
        normed_residual=False,
        eps=body.norm_eps,
    )
    return AheadNetwork(
        body=body,
        parameters=_own(target, weights, body, width=2 * HIDDEN),
        entrance=entrance,
        taps=(0, last // 2, last),
        vocabulary=DraftVocabulary(size=VOCABULARY),
    )


def _block(settings: DrafterSettings, weights: Weights, windows: Windows) -> DFlash:
    target = settings.target
    body = _spec(windows, target.spec.max_position, qk_norm=True)
    spec = DFlashSpec(
        body=body,
        causal=tuple(window is not None for window in windows),
        anchored=False,
        taps=(0, len(target.spec.layers) - 1),
        mask_token=MASK_TOKEN,
        block_size=BLOCK_ROWS,
    )
    parameters = DFlashParameters(
        body=_own(target, weights, body),
        fuse=weights.linear(HIDDEN, 2 * HIDDEN),
        context_norm=torch.ones(HIDDEN),
        vocabulary=DraftVocabulary(size=VOCABULARY),
    )
    return DFlash(spec, parameters, settings, name="random", fingerprint=f"random block {list(windows)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomDrafter:
    method: str
    make: Callable[[DrafterSettings], Drafter]


RANDOM_DRAFTERS: Mapping[str, RandomDrafter] = {
    "ngram": RandomDrafter(method="ngram", make=lambda settings: NgramDrafter(shortest=1, longest=3)),
    "draft_model": RandomDrafter(
        method="draft_model", make=lambda settings: draft_model_from(settings.target, settings, num_layers=4)
    ),
    "eagle": RandomDrafter(
        method="eagle",
        make=lambda settings: OneLayerAhead(
            _joined(settings, Weights(2), None), settings, method="eagle", name="random", fingerprint="random joined"
        ),
    ),
    "eagle3": RandomDrafter(
        method="eagle3",
        make=lambda settings: OneLayerAhead(
            _wide(settings, Weights(3)), settings, method="eagle3", name="random", fingerprint="random wide"
        ),
    ),
    "mtp": RandomDrafter(
        method="mtp",
        make=lambda settings: Mtp(
            _joined(settings, Weights(4), None), settings, name="random", fingerprint="random module"
        ),
    ),
    "mtp, window": RandomDrafter(
        method="mtp",
        make=lambda settings: Mtp(
            _joined(settings, Weights(4), DRAFTER_WINDOW), settings, name="random", fingerprint="random module, window"
        ),
    ),
    "dflash": RandomDrafter(method="dflash", make=lambda settings: _block(settings, Weights(5), (None, None))),
    "dflash, windows": RandomDrafter(
        method="dflash", make=lambda settings: _block(settings, Weights(6), (DRAFTER_WINDOW, DRAFTER_WINDOW, None))
    ),
}


class MostlyRight(Drafter):
    """Runs a random drafter, whose drafts are never right, and replaces a part of them with the known text.

    How many are replaced differs from step to step, so that drafts are accepted in part.
    """

    def __init__(self, inner: Drafter, texts: Sequence[Sequence[int]]) -> None:
        assert not inner.footprint.keeps_accepted, "its KV holds the drafts that it made itself"
        self.footprint = inner.footprint
        self.layer_groups = inner.layer_groups
        self._inner = inner
        self._texts = [list(text) for text in texts]

    def bind(self, services: DraftServices) -> None:
        self._inner.bind(services)

    def feed(self, rows: Sequence[FeedRow], taps: Tensor) -> None:
        self._inner.feed(rows, taps)

    def propose(self, rows: Sequence[ProposeRow]) -> list[list[int]]:
        return self._corrected_all(rows, self._inner.propose(rows))

    def step(self, feeds: Sequence[FeedRow], taps: Tensor, proposals: Sequence[ProposeRow]) -> list[list[int]]:
        return self._corrected_all(proposals, self._inner.step(feeds, taps, proposals))

    def _corrected_all(self, rows: Sequence[ProposeRow], found: Sequence[list[int] | Proposal]) -> list[list[int]]:
        given = [Proposal.of(each).drafts for each in found]
        return [self._corrected(row.request.tokens.tolist(), drafts) for row, drafts in zip(rows, given, strict=True)]

    def _corrected(self, known: list[int], drafts: list[int]) -> list[int]:
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        right = text[len(known) : len(known) + len(drafts)][: len(known) % (len(drafts) + 1)]
        return right + drafts[len(right) :]

    def forget(self, request_id: str) -> None:
        self._inner.forget(request_id)
