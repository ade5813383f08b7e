"""One decoder layer that pairs what the target made of position p with the token at p + 1, and runs ahead.

    feed      rows [durable end, v): row p joins features of p and token p + 1; all but the last only leave their keys
              and values behind, the last one is run through and chooses the draft at v + 1
    propose   row v, v + 1, …: the layer's own output takes the place of the target's; k - 1 passes

A key depends on the row's own input only, so feeding reads no KV.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.layers.ops import Ops
from outrider.layers.rows import Rows, Span
from outrider.models.decoder import Decoder
from outrider.models.kv_groups import LayerGroups, layer_groups
from outrider.models.parameters import DecoderParameters, Linear, Matrix, mapped
from outrider.models.spec import DecoderSpec
from outrider.speculative.abilities import check_abilities
from outrider.speculative.drafter import Drafter, DraftServices, FeedRow, ProposeRow, draw_one_more
from outrider.speculative.drafters.taps import tap_rows
from outrider.speculative.footprints import DrafterShape, footprint_for
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary


class Entrance(ABC):
    """How a token's embedding and the features before it become the input of the layer."""

    @abstractmethod
    def mapped(self, change: Callable[[Matrix], Matrix]) -> Entrance:
        """The same with its matrices changed."""

    @abstractmethod
    def features(self, taps: Tensor, ops: Ops) -> Tensor:
        """From the target's taps, side by side."""

    @abstractmethod
    def enter(self, embedded: Tensor, features: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """What queries, keys and values are made from, and the residual. May write over `features`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JoinedEntrance(Entrance):
    """Embedding and features are projected to one hidden state, which enters an ordinary layer.

    Features are the target's last hidden states after its last norm.
    """

    join: Linear
    """Embedding first, then features: [hidden, 2 * hidden]."""
    target_norm: Tensor
    target_eps: float
    eps: float
    embedding_norm: Tensor | None = None
    feature_norm: Tensor | None = None
    input_norm: Tensor | None = None

    def mapped(self, change: Callable[[Matrix], Matrix]) -> Entrance:
        return replace(self, join=self.join.mapped(change))

    def features(self, taps: Tensor, ops: Ops) -> Tensor:
        return ops.norm(taps, self.target_norm, self.target_eps)

    def enter(self, embedded: Tensor, features: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        if self.embedding_norm is not None:
            embedded = ops.norm(embedded, self.embedding_norm, self.eps)
        if self.feature_norm is not None:
            features = ops.norm(features, self.feature_norm, self.eps)
        x = ops.project(torch.cat([embedded, features], dim=1), self.join)
        return (x if self.input_norm is None else ops.norm(x, self.input_norm, self.eps)), x


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AheadNetwork:
    body: DecoderSpec
    """One layer."""
    parameters: DecoderParameters
    entrance: Entrance
    taps: tuple[int, ...]
    vocabulary: DraftVocabulary
    final_norm: bool = True
    """Outputs are normed before the head."""
    carries_normed: bool = False
    """The normed output is the next row's features, not the output itself."""


class OneLayerAhead(Drafter):
    layer_groups: LayerGroups
    usual_k = 5

    def __init__(
        self, network: AheadNetwork, settings: DrafterSettings, *, method: str, name: str, fingerprint: str
    ) -> None:
        body = network.body
        assert len(body.layers) == 1
        pack = settings.packer()
        network = self._network = replace(
            network, parameters=mapped(network.parameters, pack), entrance=network.entrance.mapped(pack)
        )
        self.layer_groups = layer_groups(
            body, owner="draft", page_tokens=settings.page_tokens, item_bytes=settings.dtype.itemsize
        )
        check_abilities(settings.ops, self.layer_groups, name)
        limit = min(settings.max_model_len, body.max_position)
        self._decoder = Decoder(body, network.parameters, settings.ops, max_position=limit)
        self._pair = self._decoder.parameters.layers[0].qkv.rows(slice(body.query_size, None))
        shape = DrafterShape(groups=self.layer_groups.specs, taps=network.taps, max_len=limit, fingerprint=fingerprint)
        self.footprint = footprint_for(method, shape)
        self._services: DraftServices | None = None
        self._fed: dict[str, Tensor] = {}
        """Output of the last fed row, for requests that propose in this step."""

    def bind(self, services: DraftServices) -> None:
        self._services = services

    def feed(self, rows: Sequence[FeedRow], taps: Tensor) -> None:
        self._fed.clear()
        passed: list[Span] = []
        passed_taps: list[tuple[int, int]] = []
        last: list[Span] = []
        last_taps: list[tuple[int, int]] = []
        drafting: list[str] = []
        for row in rows:
            (start, end), request = row.interval, row.request
            stop = end - 1 if row.proposes else end
            if stop > start:
                passed.append(_span(request.line, start, request.tokens[start + 1 : stop + 1]))
                passed_taps.append((row.taps_at, stop - start))
            if row.proposes:
                last.append(_span(request.line, stop, request.tokens[end : end + 1]))
                last_taps.append((row.taps_at + stop - start, 1))
                drafting.append(request.id)
        entrance, ops = self._network.entrance, self._decoder.ops
        if passed:
            self._leave_pairs(self._rows(passed), entrance.features(tap_rows(taps, passed_taps), ops))
        if last:
            hidden = self._run(self._rows(last), entrance.features(tap_rows(taps, last_taps), ops))
            self._fed = dict(zip(drafting, hidden, strict=True))

    def _rows(self, spans: Sequence[Span]) -> Rows:
        assert self._services is not None
        return self._services.rows.rows(spans, self._services.groups)

    def _enter(self, rows: Rows, features: Tensor) -> tuple[Tensor, Tensor]:
        decoder = self._decoder
        embedded = decoder.ops.embed(rows.tokens, decoder.parameters.embedding, decoder.spec.embedding_scale)
        return self._network.entrance.enter(embedded, features, decoder.ops)

    def _leave_pairs(self, rows: Rows, features: Tensor) -> None:
        assert self._services is not None
        ops = self._decoder.ops
        pairs = ops.project(self._enter(rows, features)[0], self._pair)
        ops.store(pairs, self._decoder.attention[0], self._services.kv[0], rows.groups[0])

    def _run(self, rows: Rows, features: Tensor) -> Tensor:
        assert self._services is not None
        decoder, ops = self._decoder, self._decoder.ops
        layer = decoder.parameters.layers[0]
        x, residual = self._enter(rows, features)
        qkv = ops.project(x, layer.qkv)
        attended = ops.attend(qkv, decoder.attention[0], self._services.kv[0], rows.groups[0])
        x = ops.project_add(
            attended, layer.out, residual, post_norm=layer.attention_post_norm, eps=decoder.spec.norm_eps
        )
        return decoder.feed_forward(0, layer, x)

    def _logits(self, hidden: Tensor) -> Tensor:
        decoder, network = self._decoder, self._network
        if network.final_norm:
            return decoder.logits(hidden)
        return decoder.ops.project(hidden, decoder.parameters.head).float()

    def _carried(self, hidden: Tensor) -> Tensor:
        if not self._network.carries_normed:
            return hidden
        return self._decoder.ops.norm(hidden, self._decoder.parameters.final_norm, self._network.body.norm_eps)

    def propose(self, rows: Sequence[ProposeRow]) -> list[list[int]]:
        services = self._services
        assert services is not None
        drafts: list[list[int]] = [[] for _ in rows]
        hidden = torch.stack([self._fed[row.request.id] for row in rows])
        drafting = list(range(len(rows)))
        while True:
            vocabulary = self._network.vocabulary
            going_on = draw_one_more(services, self._logits(hidden), rows, drafts, drafting, vocabulary)
            if not going_on:
                return drafts
            drafting = [drafting[place] for place in going_on]
            # The row before the one to come was at v - 1 + (drafts so far) - 1: it chose the last draft.
            spans = [
                _span(rows[number].request.line, rows[number].v + len(drafts[number]) - 1, drafts[number][-1:])
                for number in drafting
            ]
            features = self._carried(hidden[torch.tensor(going_on, device=hidden.device)])
            hidden = self._run(self._rows(spans), features)


def _span(line: int, start: int, tokens: Sequence[int]) -> Span:
    return Span(line=line, start=start, tokens=tokens, kept_from=0)
