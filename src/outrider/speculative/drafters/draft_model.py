"""A smaller decoder that reads the same tokens and runs ahead, one token a pass.

It consumes the last sampled token while it is fed, so the first draft costs no pass of its own:

    feed      rows [durable end, v + 1)      the last row's logits choose the draft at v + 1
    propose   row v + 1, v + 2, …            k - 1 passes over the requests that still draft
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.layers.rows import Span
from outrider.models.decoder import Decoder, LayerPlaces
from outrider.models.kv_groups import LayerGroups
from outrider.speculative.drafter import Drafter, DraftServices, FeedRow, ProposeRow, draw_one_more
from outrider.speculative.footprints import DrafterShape, footprint_for
from outrider.speculative.vocabulary import DraftVocabulary


class DraftModel(Drafter):
    layer_groups: LayerGroups

    def __init__(
        self, decoder: Decoder, groups: LayerGroups, *, max_len: int, fingerprint: str, target_vocab_size: int
    ) -> None:
        self.layer_groups = groups
        shape = DrafterShape(groups=groups.specs, max_len=max_len, fingerprint=fingerprint)
        self.footprint = footprint_for("draft_model", shape)
        self._decoder = decoder
        self._vocabulary = DraftVocabulary(size=target_vocab_size)
        self._embeds_all = decoder.spec.vocab_size >= target_vocab_size
        self._services: DraftServices | None = None
        self._places: LayerPlaces | None = None
        self._fed: dict[str, Tensor] = {}
        """Hidden state of the last fed row, for requests that propose in this step."""

    def bind(self, services: DraftServices) -> None:
        self._services = services
        self._places = LayerPlaces(services.kv, self.layer_groups)

    def feed(self, rows: Sequence[FeedRow], taps: Tensor) -> None:
        self._fed.clear()
        spans = [
            Span(
                line=row.request.line,
                start=row.interval.start,
                tokens=row.request.tokens[row.interval.start : row.interval.end],
                kept_from=0,
            )
            for row in rows
        ]
        hidden, last_rows = self._run(spans)
        for number, row in enumerate(rows):
            if row.proposes:
                self._fed[row.request.id] = hidden[last_rows[number]]

    def _run(self, spans: Sequence[Span]) -> tuple[Tensor, list[int]]:
        """Hidden states of all rows, and the number of each span's last row."""
        services = self._services
        assert services is not None
        assert self._places is not None
        rows = services.rows.rows(spans, services.groups)
        tokens = rows.tokens
        if not self._embeds_all:
            # Relatives pad their vocabularies differently. An id from the padding means nothing to either, but the
            # target may be given one: any embedding will do for a draft.
            tokens = tokens.clamp(max=self._decoder.spec.vocab_size - 1)
        hidden = self._decoder.forward(tokens, self._places.of(rows)).final
        return hidden, [first + len(span.tokens) - 1 for first, span in zip(rows.first_row, spans, strict=True)]

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
                    spans.append(
                        Span(line=rows[number].request.line, start=at, tokens=drafts[number][-1:], kept_from=0)
                    )
                hidden = self._run(spans)[0]
        return drafts
