"""A draft model: a smaller decoder that reads the same tokens and runs ahead, one token a pass.

It consumes the last sampled token while it is fed, so the first draft costs no pass of its own:

    feed      rows [durable end, v + 1)      the last row's logits choose the draft at v + 1
    propose   row v + 1, v + 2, …            k - 1 passes over the requests that still draft
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.backends.batch import Span
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.kv.archetypes import ARCHETYPES, DrafterShape, chain_from_tokens
from outrider.models.decoder import Decoder, PagedDecoder
from outrider.models.kv_groups import LayerGroups, layer_groups
from outrider.models.load import LoadedModel, load_model
from outrider.speculative.checkpoints.source import DrafterFiles, named_checkpoint
from outrider.speculative.drafter import Drafter, DraftServices, FeedRow, ProposeRow, draw_one_more
from outrider.speculative.method import DrafterMethod
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary


class DraftModel(Drafter):
    layer_groups: LayerGroups

    def __init__(
        self, decoder: Decoder, groups: LayerGroups, *, max_len: int, fingerprint: str, target_vocab_size: int
    ) -> None:
        self.layer_groups = groups
        shape = DrafterShape(groups=groups.specs, max_len=max_len, fingerprint=fingerprint)
        self.footprint = chain_from_tokens("draft_model", shape)
        self._decoder = decoder
        self._vocabulary = DraftVocabulary(size=target_vocab_size)
        self._embeds_all = decoder.spec.vocab_size >= target_vocab_size
        self._services: DraftServices | None = None
        self._paged: PagedDecoder | None = None
        self._fed: dict[str, Tensor] = {}
        """Hidden state of the last fed row, for requests that propose in this step."""

    def bind(self, services: DraftServices) -> None:
        self._services = services
        self._paged = self._decoder.bind(services.kv, self.layer_groups)

    def feed(self, rows: Sequence[FeedRow], taps: Tensor) -> None:
        self._fed.clear()
        spans = [
            Span(row.request.table_row, row.interval.start, row.request.tokens[row.interval.start : row.interval.end])
            for row in rows
        ]
        hidden, last_rows = self._run(spans)
        for number, row in enumerate(rows):
            if row.proposes:
                self._fed[row.request.id] = hidden[last_rows[number]]

    def _run(self, spans: Sequence[Span]) -> tuple[Tensor, list[int]]:
        """Returns the hidden states of all rows, and the index of each span's last row."""
        services = self._services
        assert services is not None
        assert self._paged is not None
        batch = services.batches.build(spans, services.groups)
        if not self._embeds_all:
            # Models of one family pad their vocabularies differently. An id from the padding means nothing to either,
            # but the target may be given one: any embedding will do for a draft.
            batch = batch._replace(token_ids=batch.token_ids.clamp(max=self._decoder.spec.vocab_size - 1))
        hidden = self._paged.forward(batch).hidden
        return hidden, [first + len(span.token_ids) - 1 for first, span in zip(batch.first_rows, spans, strict=True)]

    def propose(self, rows: Sequence[ProposeRow]) -> list[list[int]]:
        services = self._services
        assert services is not None
        drafts: list[list[int]] = [[] for _ in rows]
        hidden = torch.stack([self._fed[row.request.id] for row in rows])
        drafting = list(range(len(rows)))
        while drafting:
            logits = self._decoder.logits(hidden)
            going_on = draw_one_more(services, logits, rows, drafts, drafting, self._vocabulary)
            drafting = [drafting[place] for place in going_on]
            if drafting:
                spans = []
                for number in drafting:
                    # The draft before the one to come is consumed: it sits at v + (drafts so far).
                    at = rows[number].v + len(drafts[number])
                    spans.append(Span(rows[number].request.table_row, at, drafts[number][-1:]))
                hidden = self._run(spans)[0]
        return drafts


# ---- checkpoints ---------------------------------------------------------------------------------------


def load_draft_model(config: SpeculativeConfig, settings: DrafterSettings) -> DraftModel:
    progress = settings.progress
    report = None if progress is None else lambda done, total: progress("loading the draft model", done, total)
    model = load_model(
        named_checkpoint(config, settings),
        dtype=settings.dtype,
        device=settings.device,
        progress=report,
        forms=settings.forms,
    )
    return draft_model_from(model, settings, num_layers=config.num_hidden_layers)


def draft_model_from(model: LoadedModel, settings: DrafterSettings, *, num_layers: int | None = None) -> DraftModel:
    """A drafter from a model that is loaded already, or from its first `num_layers` layers."""
    difference = settings.target.tokenizer.difference(model.tokenizer)
    if difference is not None:
        raise ConfigError(
            f"the draft model {model.name} cannot draft for {settings.target.name}: {difference}; "
            "choose a draft model with the same tokenizer"
        )
    spec, parameters, fingerprint = model.spec, model.parameters, model.fingerprint
    if spec.vocab_size < settings.target.tokenizer.vocab_size:
        raise ConfigError(
            f"the draft model {model.name} embeds {spec.vocab_size} tokens, but {settings.target.name} can write "
            f"{settings.target.tokenizer.vocab_size}; choose a draft model with the same tokenizer"
        )
    if num_layers is not None:
        if num_layers > len(spec.layers):
            raise ConfigError(
                f"num_hidden_layers is {num_layers}, but the draft model {model.name} has only {len(spec.layers)} "
                "layers; choose a smaller number, or leave it out"
            )
        spec = replace(spec, layers=spec.layers[:num_layers])
        parameters = replace(parameters, layers=parameters.layers[:num_layers])
        fingerprint = f"{fingerprint}/{num_layers}"
    limit = min(settings.max_model_len, spec.max_position)
    groups = layer_groups(spec, owner="draft", page_tokens=settings.page_tokens, item_bytes=settings.dtype.itemsize)
    decoder = Decoder(spec, parameters, settings.backend, max_position=limit)
    return DraftModel(
        decoder,
        groups,
        max_len=limit,
        fingerprint=fingerprint,
        target_vocab_size=settings.target.spec.vocab_size,
    )


def is_whole_model(files: DrafterFiles) -> bool:
    """Whether a checkpoint embeds tokens itself and reads no hidden states of another model."""
    return "embed_tokens.weight" in files.tensors and "fc.weight" not in files.tensors


DRAFT_MODEL = DrafterMethod(
    name="draft_model",
    title="draft model",
    archetype=ARCHETYPES["chain_from_tokens"],
    load=load_draft_model,
    options=frozenset({"model", "num_hidden_layers", "draft_confidence"}),
    recognises=is_whole_model,
    reads_gguf=True,
)
