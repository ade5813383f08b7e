"""Medusa-like heads: head j predicts the token at v + 1 + j from the target's hidden state at v - 1.

A checkpoint is a directory with two files:

    config.json          {"architectures": ["MedusaHeads"], "num_heads": 4, "hidden_size": 576,
                          "head_accuracy": [0.7, 0.5, 0.4, 0.3]}
    model.safetensors    heads.J.linear.weight [hidden, hidden], heads.J.linear.bias [hidden], for each head J
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from outrider.config import SpeculativeConfig
from outrider.errors import ModelError
from outrider.kv.archetypes import ARCHETYPES, DrafterShape, heads
from outrider.models.parameters import Linear
from outrider.models.recipes.layout import Layout, whole
from outrider.speculative.checkpoints import fit
from outrider.speculative.checkpoints.source import DrafterFiles, named_checkpoint, open_drafter
from outrider.speculative.drafter import Drafter, DraftServices, DrawRow, FeedRow, Proposal, ProposeRow
from outrider.speculative.method import DrafterMethod
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary


class Medusa(Drafter):
    def __init__(
        self, blocks: Sequence[Linear], accuracy: Sequence[float], settings: DrafterSettings, *, fingerprint: str
    ) -> None:
        target = settings.target
        self._backend, self._blocks, self._accuracy = settings.backend, blocks, accuracy
        self._norm, self._eps = target.parameters.final_norm, target.spec.norm_eps
        self._head = target.parameters.head
        self._vocabulary = DraftVocabulary(size=target.spec.vocab_size)
        self._services: DraftServices | None = None
        # `outrider doctor` has drafters read other layers, to find out which ones are right.
        taps = fit.chosen_taps((len(target.spec.layers) - 1,), settings)
        self.footprint = heads("medusa", DrafterShape(taps=taps, fingerprint=fingerprint))
        self.default_k = len(blocks)

    def bind(self, services: DraftServices) -> None:
        self._services = services

    def step(self, feeds: Sequence[FeedRow], taps: Tensor, proposals: Sequence[ProposeRow]) -> list[Proposal]:
        """There is never anything to feed: the heads own no KV."""
        if not proposals:
            return []
        assert self._services is not None
        tapped = taps[torch.tensor([row.tap_row for row in proposals], device=taps.device)]
        hidden = self._backend.norm(tapped, self._norm, self._eps)
        drafts: list[list[int]] = [[] for _ in proposals]
        for number, block in enumerate(self._blocks):
            # Requests may want different numbers of drafts.
            wanting = [index for index, row in enumerate(proposals) if row.k > number]
            if not wanting:
                break
            x = hidden[torch.tensor(wanting, device=hidden.device)]
            logits = self._backend.project(x + silu(self._backend.project(x, block)), self._head).float()
            rows = [
                DrawRow(proposals[index].request, proposals[index].v + 1 + number, tuple(drafts[index]))
                for index in wanting
            ]
            for index, token in zip(wanting, self._services.draw(logits, rows, self._vocabulary), strict=True):
                drafts[index].append(token)
        return [Proposal(drafted, self._accuracy[: len(drafted)] or None) for drafted in drafts]


def load_medusa(config: SpeculativeConfig, settings: DrafterSettings) -> Medusa:
    opened = open_drafter(named_checkpoint(config, settings))
    files, hidden = opened.files, settings.target.spec.hidden_size
    fit.check_hidden_size(files.config, files.config.integer("hidden_size"), settings)
    count = files.config.integer("num_heads")
    accuracy = files.config.fields.get("head_accuracy", [])
    if count < 1 or len(accuracy) not in (0, count):
        raise ModelError(f"{files.config.source}: head_accuracy must have one number for each of the {count} heads")
    layout: Layout = {}
    for number in range(count):
        layout[f"{number}.weight"] = whole(f"heads.{number}.linear.weight", (hidden, hidden))
        layout[f"{number}.bias"] = whole(f"heads.{number}.linear.bias", (hidden,))
    filled = files.fill(layout, settings, what="a Medusa drafter", harmless=lambda name: False)
    blocks = [Linear(weight=filled[f"{n}.weight"], bias=filled[f"{n}.bias"]) for n in range(count)]
    return Medusa(blocks, accuracy, settings, fingerprint=settings.fingerprint(opened.fingerprint))


def is_medusa(files: DrafterFiles) -> bool:
    return files.architecture == "MedusaHeads"


MEDUSA = DrafterMethod(
    name="medusa",
    title="Medusa",
    archetype=ARCHETYPES["heads"],
    load=load_medusa,
    options=frozenset({"model", "draft_confidence"}),
    recognises=is_medusa,
)
