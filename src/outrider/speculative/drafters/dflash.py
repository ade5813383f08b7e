"""One pass drafts a whole block: the last sampled token and k masks, over a context made from the target's taps.

    feed      context rows [durable end, v): hidden_norm(fc(taps)) gives keys and values of all layers in one product
    propose   rows v … v + k: the token at v, then masks; row v + j predicts the token at its own position

A context row has no queries and passes no feed-forward network, so feeding reads no KV. Which rows of a block see
each other is decided per layer: see `GroupSpec.causal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from outrider.kv.groups import Sliding
from outrider.layers.attention import AttentionRows
from outrider.layers.ops import Greatest, Ready, Recorded
from outrider.layers.rows import Span
from outrider.models.decoder import RECORDED_ROWS_MAX, Decoder, LayerPlaces
from outrider.models.kv_groups import LayerGroups, layer_groups
from outrider.models.parameters import DecoderParameters, Linear, mapped, stacked
from outrider.models.spec import DecoderSpec
from outrider.speculative.abilities import check_abilities
from outrider.speculative.drafter import Drafter, DraftServices, DrawRow, FeedRow, ProposeRow
from outrider.speculative.drafters.taps import TapRows
from outrider.speculative.footprints import DrafterShape, footprint_for
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashSpec:
    body: DecoderSpec
    """Its own layers; embedding and head may be the target's."""
    causal: tuple[bool, ...]
    """Per layer: does a row of a block see only the rows before it?"""
    anchored: bool
    """Windows are measured from the block's first row: all its rows see [anchor - window, anchor) and the block.
    Otherwise each row has a window of its own."""
    taps: tuple[int, ...]
    mask_token: int
    block_size: int
    """Rows of a block as it was trained. Fewer would draft less well, so fewer drafts come from as many rows; more
    rows than trained work, less well."""
    smaller_blocks: tuple[int, ...] = ()
    """Rows of further blocks that it was trained with, rising: for fewer drafts these do as well."""

    def rows_for(self, most_drafts: int | None) -> int:
        """Of a block for so many drafts."""
        wanted = self.block_size if most_drafts is None else 1 + most_drafts
        return next((rows for rows in self.smaller_blocks if rows >= wanted), self.block_size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DFlashParameters:
    body: DecoderParameters
    fuse: Linear
    """Taps side by side to one hidden state: [hidden, taps * hidden]."""
    context_norm: Tensor
    vocabulary: DraftVocabulary


class DFlash(Drafter):
    layer_groups: LayerGroups

    def __init__(
        self,
        spec: DFlashSpec,
        parameters: DFlashParameters,
        settings: DrafterSettings,
        *,
        name: str,
        fingerprint: str,
    ) -> None:
        self.spec = spec
        self.layer_groups = block_groups(spec, page_tokens=settings.page_tokens, item_bytes=settings.dtype.itemsize)
        check_abilities(settings.ops, self.layer_groups, name)
        limit = min(settings.max_model_len, spec.body.max_position)
        pack = settings.packer()
        self._decoder = Decoder(spec.body, mapped(parameters.body, pack), settings.ops, max_position=limit)
        self._fuse, self._context_norm = parameters.fuse.mapped(pack), parameters.context_norm
        self._vocabulary = parameters.vocabulary
        self._context = context_projection(spec.body, self._decoder.parameters)
        shape = DrafterShape(
            groups=self.layer_groups.specs,
            taps=spec.taps,
            max_len=limit,
            fingerprint=fingerprint,
            block_rows=min(spec.rows_for(settings.most_drafts), limit),
        )
        self.footprint = footprint_for("dflash", shape)
        self.usual_k = spec.block_size - 1
        self._services: DraftServices | None = None
        self._places: LayerPlaces | None = None
        self._recorded: dict[int, Recorded[None] | None] = {}
        """Feeding, by number of rows."""
        self._taps = TapRows()

    def bind(self, services: DraftServices) -> None:
        self._services = services
        self._places = LayerPlaces(services.kv, self.layer_groups)
        self._recorded.clear()
        self._taps = TapRows()

    def step(self, feeds: Sequence[FeedRow], taps: Tensor, proposals: Sequence[ProposeRow]) -> list[list[int]]:
        """In one call where both are recorded: what Python does in between, and waking threads, costs about as much as
        feeding."""
        ready = self._ready_to_feed(feeds, taps) if feeds else None
        if proposals:
            return self._propose(proposals, ready)
        if ready is not None:
            ready.run()
        return []

    def feed(self, rows: Sequence[FeedRow], taps: Tensor) -> None:
        self.step(rows, taps, ())

    def _ready_to_feed(self, rows: Sequence[FeedRow], taps: Tensor) -> Ready | None:
        """None: it is done."""
        services = self._services
        assert services is not None
        assert self._places is not None
        spans = [
            Span(
                line=row.request.line,
                start=row.interval.start,
                tokens=row.request.tokens[row.interval.start : row.interval.end],
                kept_from=0,
            )
            for row in rows
        ]
        fed = services.rows.rows(spans, services.groups, beside=True)
        taken = self._taps.of(taps, [(row.taps_at, row.interval.size) for row in rows])
        places = [layer.rows for layer in self._places.of(fed)]
        count = sum(row.interval.size for row in rows)
        if count > RECORDED_ROWS_MAX:
            self._leave_pairs(taken, places)
            return None
        if count not in self._recorded:
            self._recorded[count] = self._decoder.ops.record(taken, places, lambda x: self._leave_pairs(x, places))
        recorded = self._recorded[count]
        if recorded is None:
            self._leave_pairs(taken, places)
            return None
        return Ready(recorded, taken, places)

    def _leave_pairs(self, taps: Tensor, places: Sequence[AttentionRows]) -> None:
        """Keys and values of context rows, to their slots in every layer."""
        assert self._services is not None
        body, ops = self.spec.body, self._decoder.ops
        context = ops.norm(ops.project(taps, self._fuse), self._context_norm, body.norm_eps)
        pairs = ops.project(context, self._context)
        # [layers, rows, keys and values]
        for number, pair in enumerate(pairs.view(len(taps), -1, 2 * body.kv_size).unbind(1)):
            ops.store(pair, self._decoder.attention[number], self._services.kv[number], places[number])

    def propose(self, rows: Sequence[ProposeRow]) -> list[list[int]]:
        return self._propose(rows, None)

    def _propose(self, rows: Sequence[ProposeRow], after: Ready | None) -> list[list[int]]:
        services = self._services
        assert services is not None
        assert self._places is not None
        blocks = [self.footprint.scratch(v, k) for _request, v, k in rows]
        spans = [
            Span(
                line=request.line,
                start=v,
                tokens=[request.tokens[v], *[self.spec.mask_token] * (block.size - 1)],
                kept_from=0,
                sees_to=block.end,
                anchored=self.spec.anchored,
            )
            for (request, v, _k), block in zip(rows, blocks, strict=True)
        ]
        block = services.rows.rows(spans, services.groups)
        # The first row of each block is the token that is known already; the last may be there for company only.
        masks = [first + 1 + j for first, row in zip(block.first_row, rows, strict=True) for j in range(row.k)]
        together = (masks[0], masks[-1] + 1) if len(rows) == 1 else None
        hidden = self._decoder.forward(
            block.tokens, self._places.of(block), scored=together, shares=services.weighs(), after=after
        )
        logits, found = hidden.logits, hidden.greatest
        if logits is None:
            logits = self._decoder.logits(hidden.final[torch.tensor(masks, device=hidden.final.device)])
        return draw_block(services, rows, logits, self._vocabulary, found)


def draw_block(
    services: DraftServices,
    rows: Sequence[ProposeRow],
    logits: Tensor,
    vocabulary: DraftVocabulary,
    found: Greatest | None = None,
) -> list[list[int]]:
    """k drafts for each row from k logits each, lying one after the other. `found`: the largest of them, if known.

    All are known at once, so all are drawn at once, but for requests whose draws depend on earlier drafts.
    """
    if not any(row.request.draws_depend for row in rows):
        draws = [DrawRow(row.request, row.v + 1 + draft, ()) for row in rows for draft in range(row.k)]
        drawn = iter(services.draw(logits, draws, vocabulary, found))
        return [list(islice(drawn, row.k)) for row in rows]
    drafts: list[list[int]] = [[] for _ in rows]
    first, starts = 0, []
    for row in rows:
        starts.append(first)
        first += row.k
    while True:
        places: list[tuple[int, int]] = []  # (row, draft)
        for number, (request, _v, k) in enumerate(rows):
            have = len(drafts[number])
            stop = min(k, have + 1) if request.draws_depend else k
            places.extend((number, draft) for draft in range(have, stop))
        if not places:
            return drafts
        draws = [
            DrawRow(rows[number].request, rows[number].v + 1 + draft, tuple(drafts[number])) for number, draft in places
        ]
        wanted = [starts[number] + draft for number, draft in places]
        asked = logits[torch.tensor(wanted, device=logits.device)]
        for (number, _draft), token in zip(places, services.draw(asked, draws, vocabulary), strict=True):
            drafts[number].append(token)


def block_groups(spec: DFlashSpec, *, page_tokens: int, item_bytes: int) -> LayerGroups:
    """KV groups of the layers: by window, with the causality that layers of one window share."""
    groups = layer_groups(spec.body, owner="draft", page_tokens=page_tokens, item_bytes=item_bytes)
    specs = []
    for number, group in enumerate(groups.specs):
        causal = {causal for causal, (at, _place) in zip(spec.causal, groups.place, strict=True) if at == number}
        assert len(causal) == 1, "layers of one window attend one way"
        kind = group.kind
        if spec.anchored and isinstance(kind, Sliding):
            # A query's window counts the query; the window before an anchor does not.
            kind = Sliding(kind.window + 1)
        specs.append(replace(group, causal=causal.pop(), kind=kind))
    return replace(groups, specs=tuple(specs))


def context_projection(body: DecoderSpec, parameters: DecoderParameters) -> Linear:
    """Keys and values of all layers from one product: [layers * (key + value), hidden]."""
    pairs = [layer.qkv.rows(slice(body.query_size, None)) for layer in parameters.layers]
    biases = [pair.bias for pair in pairs if pair.bias is not None]
    return Linear(weight=stacked([pair.weight for pair in pairs]), bias=torch.cat(biases) if biases else None)
