"""What EAGLE and MTP share: one decoder layer that pairs the target's hidden state at p with the token at p + 1.

    feed      rows [durable end, v): row p joins the features of p and token p + 1; all rows but the last only store
              their keys and values, the last one runs through the layer and chooses the draft at v + 1
    propose   row v, v + 1, …: the layer's own output takes the place of the target's; k - 1 passes

A key depends on the row's own input only, so feeding reads no KV.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.backends.attention import AttentionMetadata
from outrider.backends.base import Backend, Pass
from outrider.backends.batch import Batch, Span
from outrider.kv.archetypes import DrafterShape, chain_from_taps
from outrider.models.decoder import Decoder
from outrider.models.kv_groups import LayerGroups, layer_groups
from outrider.models.parameters import DecoderParameters, Linear, Matrix, mapped
from outrider.models.spec import DecoderSpec
from outrider.speculative.abilities import check_abilities
from outrider.speculative.drafter import Drafter, DraftServices, FeedRow, ProposeRow, draw_one_more, tap_rows
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary


class Entrance(ABC):
    """Turns a token's embedding and the features of the position before it into the input of the layer."""

    @abstractmethod
    def mapped(self, change: Callable[[Matrix], Matrix]) -> Entrance:
        """Returns the same entrance with `change` applied to its matrices."""

    @abstractmethod
    def features(self, taps: Tensor, backend: Backend) -> Tensor:
        """Returns the features of rows, given the target's taps side by side."""

    @abstractmethod
    def enter(self, embedded: Tensor, features: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
        """Returns the input of queries, keys and values, and the residual. May overwrite `features`."""


def side_by_side(first: Tensor, second: Tensor, backend: Backend) -> Tensor:
    """Returns the columns of both, in a way that a pass can record."""
    width = first.shape[1]
    both = first.new_empty(first.shape[0], width + second.shape[1])
    backend.copy(first, both[:, :width])
    backend.copy(second, both[:, width:])
    return both


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JoinedEntrance(Entrance):
    """Embedding and features are projected to one hidden state, which enters an ordinary layer.

    Features are the target's last hidden states after its last norm.
    """

    join: Linear
    """Projects the embedding and the features, in this order: [hidden, 2 * hidden]."""
    target_norm: Tensor
    target_eps: float
    eps: float
    embedding_norm: Tensor | None = None
    feature_norm: Tensor | None = None
    input_norm: Tensor | None = None

    def mapped(self, change: Callable[[Matrix], Matrix]) -> Entrance:
        return replace(self, join=self.join.mapped(change))

    def features(self, taps: Tensor, backend: Backend) -> Tensor:
        return backend.norm(taps, self.target_norm, self.target_eps)

    def enter(self, embedded: Tensor, features: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
        if self.embedding_norm is not None:
            embedded = backend.norm(embedded, self.embedding_norm, self.eps)
        if self.feature_norm is not None:
            features = backend.norm(features, self.feature_norm, self.eps)
        x = backend.project(side_by_side(embedded, features, backend), self.join)
        return (x if self.input_norm is None else backend.norm(x, self.input_norm, self.eps)), x


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AheadNetwork:
    body: DecoderSpec
    """A decoder of one layer."""
    parameters: DecoderParameters
    entrance: Entrance
    taps: tuple[int, ...]
    vocabulary: DraftVocabulary
    final_norm: bool = True
    """Whether outputs are normed before the head."""
    carries_normed: bool = False
    """Whether the next row's features are the normed output, rather than the output itself."""


class OneLayerAhead(Drafter):
    layer_groups: LayerGroups
    default_k = 5

    def __init__(
        self, network: AheadNetwork, settings: DrafterSettings, *, method: str, name: str, fingerprint: str
    ) -> None:
        self.backend = settings.backend
        body = network.body
        assert len(body.layers) == 1
        pack = settings.packer()
        network = self._network = replace(
            network,
            parameters=mapped(network.parameters, settings.coarsener(), change_embedding=pack),
            entrance=network.entrance.mapped(pack),
        )
        self.layer_groups = layer_groups(
            body, owner="draft", page_tokens=settings.page_tokens, item_bytes=settings.dtype.itemsize
        )
        check_abilities(settings.backend, self.layer_groups, name)
        limit = min(settings.max_model_len, body.max_position)
        self._decoder = Decoder(body, network.parameters, settings.backend, max_position=limit)
        self._pair = self._decoder.parameters.layers[0].qkv.rows(slice(body.query_size, None))
        shape = DrafterShape(groups=self.layer_groups.specs, taps=network.taps, max_len=limit, fingerprint=fingerprint)
        self.footprint = chain_from_taps(method, shape)
        self._services: DraftServices | None = None
        self._pairs_pass: Pass[None, None] | None = None
        self._fed: dict[str, Tensor] = {}
        """Output of the last fed row, for requests that propose in this step."""

    def bind(self, services: DraftServices) -> None:
        self._services = services
        self._pairs_pass = self._decoder.backend.compile_pass(self._leave_pairs)

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
                passed.append(Span(request.table_row, start, request.tokens[start + 1 : stop + 1]))
                passed_taps.append((row.taps_at, stop - start))
            if row.proposes:
                last.append(Span(request.table_row, stop, request.tokens[end : end + 1]))
                last_taps.append((row.taps_at + stop - start, 1))
                drafting.append(request.id)
        entrance, backend = self._network.entrance, self._decoder.backend
        if passed:
            assert self._pairs_pass is not None
            batch = self._batch(passed)
            rows_of_both = torch.cat([self._embedded(batch), tap_rows(taps, passed_taps)], dim=1)
            self._pairs_pass.enqueue(rows_of_both, batch.groups, None)
        if last:
            hidden = self._run(self._batch(last), entrance.features(tap_rows(taps, last_taps), backend))
            self._fed = dict(zip(drafting, hidden, strict=True))

    def _batch(self, spans: Sequence[Span]) -> Batch:
        assert self._services is not None
        return self._services.batches.build(spans, self._services.groups)

    def _embedded(self, batch: Batch) -> Tensor:
        decoder = self._decoder
        return decoder.backend.embed(batch.token_ids, decoder.parameters.embedding, decoder.spec.embedding_scale)

    def _leave_pairs(self, both: Tensor, groups: tuple[AttentionMetadata, ...], _options: None) -> None:
        """Writes the keys and values of rows, each with the token's embedding and the target's taps side by side."""
        assert self._services is not None
        backend, entrance, width = self._decoder.backend, self._network.entrance, self._network.body.hidden_size
        embedded, features = both[:, :width], entrance.features(both[:, width:], backend)
        pairs = backend.project(entrance.enter(embedded, features, backend)[0], self._pair)
        backend.store(pairs, self._decoder.attention[0], self._services.kv[0], groups[0])

    def _run(self, batch: Batch, features: Tensor) -> Tensor:
        assert self._services is not None
        decoder, backend = self._decoder, self._decoder.backend
        layer = decoder.parameters.layers[0]
        x, residual = self._network.entrance.enter(self._embedded(batch), features, backend)
        qkv = backend.project(x, layer.qkv)
        attended = backend.attend(qkv, decoder.attention[0], self._services.kv[0], batch.groups[0])
        x = backend.project_add(
            attended, layer.out, residual, post_norm=layer.attention_post_norm, eps=decoder.spec.norm_eps
        )
        return decoder.feed_forward(0, layer, x)

    def _logits(self, hidden: Tensor) -> Tensor:
        decoder, network = self._decoder, self._network
        if network.final_norm:
            return decoder.logits(hidden)
        return decoder.backend.project(hidden, decoder.parameters.head).float()

    def _carried(self, hidden: Tensor) -> Tensor:
        if not self._network.carries_normed:
            return hidden
        return self._decoder.backend.norm(hidden, self._decoder.parameters.final_norm, self._network.body.norm_eps)

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
                Span(rows[number].request.table_row, rows[number].v + len(drafts[number]) - 1, drafts[number][-1:])
                for number in drafting
            ]
            features = self._carried(hidden[torch.tensor(going_on, device=hidden.device)])
            hidden = self._run(self._batch(spans), features)
