"""One pass drafts a whole block: the last sampled token and k masks, over a context made from the target's taps.

    feed      context rows [durable end, v): hidden_norm(fc(taps)) gives keys and values of all layers in one product
    propose   rows v … v + k: the token at v, then masks; row v + j predicts the token at its own position

A context row has no queries and passes no feed-forward network, so feeding reads no KV. Which rows of a block see
each other is decided per layer: see `GroupSpec.causal`.

Checkpoints are read in two public layouts:

    z-lab          a Qwen3-like config.json with `dflash_config`; layer id i is the output of target layer i
    speculators    `transformer_layer_config` describes the layers; layer id i is the input of target layer i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from outrider.backends.attention import AttentionMetadata
from outrider.backends.base import Argmax, Pass
from outrider.backends.batch import Span
from outrider.errors import ConfigError, ModelError
from outrider.kv.archetypes import ARCHETYPES, DrafterShape, block_from_taps
from outrider.kv.groups import Sliding
from outrider.models.decoder import Decoder, PagedDecoder
from outrider.models.kv_groups import LayerGroups, layer_groups
from outrider.models.parameters import DecoderParameters, Linear, mapped, stacked
from outrider.models.recipes.base import common_fields, make_layers
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.layout import Layout, layer_layout, whole
from outrider.models.spec import DecoderSpec
from outrider.models.weights.base import layers_from
from outrider.speculative.abilities import check_abilities
from outrider.speculative.checkpoints import fit
from outrider.speculative.checkpoints.frequent import limit_to, read_frequent
from outrider.speculative.checkpoints.source import DrafterFiles, OpenedDrafter, named_checkpoint, open_drafter
from outrider.speculative.drafter import Drafter, DraftServices, DrawRow, FeedRow, ProposeRow, tap_rows
from outrider.speculative.method import DrafterMethod, Training
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashSpec:
    """A DFlash network, described."""

    body: DecoderSpec
    """The drafter's own layers. Its embedding and head may be the target's."""
    causal: tuple[bool, ...]
    """Whether a row of a block sees only the rows before it, for each layer."""
    anchored: bool
    """Whether windows are measured from the block's first row, so that all its rows see [anchor - window, anchor) and
    the block. Otherwise each row has a window of its own."""
    taps: tuple[int, ...]
    mask_token: int
    block_size: int
    """Number of rows in the blocks that the drafter was trained with. It drafts less well with fewer rows or with more,
    so fewer drafts are taken from a block of this size."""
    smaller_blocks: tuple[int, ...] = ()
    """Sizes of smaller blocks that it was trained with as well, ascending; they serve for fewer drafts."""

    def sizes_for(self, most_drafts: int | None) -> tuple[int, ...]:
        """Numbers of rows in the blocks that serve for at most this many drafts, ascending."""
        wanted = self.block_size if most_drafts is None else 1 + most_drafts
        most = next((rows for rows in self.smaller_blocks if rows >= wanted), self.block_size)
        return (*(rows for rows in self.smaller_blocks if rows < most), most)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DFlashParameters:
    body: DecoderParameters
    fuse: Linear
    """Projects the taps, side by side, to one hidden state: [hidden, taps * hidden]."""
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
        self.backend = settings.backend
        self.layer_groups = block_groups(spec, page_tokens=settings.page_tokens, item_bytes=settings.dtype.itemsize)
        check_abilities(settings.backend, self.layer_groups, name)
        limit = min(settings.max_model_len, spec.body.max_position)
        pack = settings.packer()
        body = mapped(parameters.body, settings.coarsener(), change_embedding=pack)
        self._decoder = Decoder(spec.body, body, settings.backend, max_position=limit)
        self._fuse, self._context_norm = parameters.fuse.mapped(pack), parameters.context_norm
        self._vocabulary = parameters.vocabulary
        self._context = context_projection(spec.body, self._decoder.parameters)
        shape = DrafterShape(
            groups=self.layer_groups.specs,
            taps=spec.taps,
            max_len=limit,
            fingerprint=fingerprint,
            block_sizes=tuple(sorted({min(rows, limit) for rows in spec.sizes_for(settings.most_drafts)})),
        )
        self.footprint = block_from_taps("dflash", shape)
        self.default_k = spec.block_size - 1
        self._services: DraftServices | None = None
        self._paged: PagedDecoder | None = None
        self._feed_pass: Pass[None, None] | None = None

    def bind(self, services: DraftServices) -> None:
        self._services = services
        self._paged = self._decoder.bind(services.kv, self.layer_groups)
        self._feed_pass = self._decoder.backend.compile_pass(self._write_context)

    def feed(self, rows: Sequence[FeedRow], taps: Tensor) -> None:
        services = self._services
        assert services is not None
        assert self._feed_pass is not None
        spans, runs = [], []
        for request, (start, end), taps_at, _proposes in rows:
            spans.append(Span(request.table_row, start, request.tokens[start:end]))
            runs.append((taps_at, end - start))
        batch = services.batches.build(spans, services.groups)
        # A backend may run it in one call with the proposal that follows, or else while the next step is prepared.
        self._feed_pass.enqueue(tap_rows(taps, runs), batch.groups, None)

    def _write_context(self, taps: Tensor, groups: tuple[AttentionMetadata, ...], _options: None) -> None:
        """Writes the keys and values of context rows to their slots in every layer."""
        assert self._services is not None
        body, backend = self.spec.body, self._decoder.backend
        context = backend.norm(backend.project(taps, self._fuse), self._context_norm, body.norm_eps)
        pairs = backend.project(context, self._context)
        # [layers, rows, keys and values]
        for number, pair in enumerate(pairs.view(len(taps), -1, 2 * body.kv_size).unbind(1)):
            metadata = groups[self.layer_groups.place[number][0]]
            backend.store(pair, self._decoder.attention[number], self._services.kv[number], metadata)

    def propose(self, rows: Sequence[ProposeRow]) -> list[list[int]]:
        services = self._services
        assert services is not None
        assert self._paged is not None
        blocks = [self.footprint.scratch(v, k) for _request, v, k, _tap_row in rows]
        spans = [
            Span(
                table_row=request.table_row,
                start=v,
                token_ids=[request.tokens[v], *[self.spec.mask_token] * (block.size - 1)],
                sees_to=block.end,
                anchored=self.spec.anchored,
            )
            for (request, v, _k, _tap_row), block in zip(rows, blocks, strict=True)
        ]
        batch = services.batches.build(spans, services.groups)
        # The first row of each block is the token that is known already; the last ones may only fill the block up.
        masks = [first + 1 + j for first, row in zip(batch.first_rows, rows, strict=True) for j in range(row.k)]
        scored = (masks[0], masks[-1] + 1) if len(rows) == 1 else None
        output = self._paged.forward(batch, scored=scored, probabilities=True)
        logits, argmax = output.logits, output.argmax
        if logits is None:
            logits = self._decoder.logits(output.hidden[torch.tensor(masks, device=output.hidden.device)])
        return draw_block(services, rows, logits, self._vocabulary, argmax)


def draw_block(
    services: DraftServices,
    rows: Sequence[ProposeRow],
    logits: Tensor,
    vocabulary: DraftVocabulary,
    argmax: Argmax | None = None,
) -> list[list[int]]:
    """Draws k drafts for each row from k rows of logits each, which follow each other. `argmax`: that of the logits,
    where it is known already.

    All logits are known, so all drafts are drawn at once, but for requests whose draws depend on earlier drafts.
    """
    if not any(row.request.draws_depend for row in rows):
        draws = [DrawRow(row.request, row.v + 1 + draft, ()) for row in rows for draft in range(row.k)]
        drawn = iter(services.draw(logits, draws, vocabulary, argmax))
        return [list(islice(drawn, row.k)) for row in rows]
    drafts: list[list[int]] = [[] for _ in rows]
    first, starts = 0, []
    for row in rows:
        starts.append(first)
        first += row.k
    while True:
        places: list[tuple[int, int]] = []  # (row, draft)
        for number, (request, _v, k, _tap_row) in enumerate(rows):
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
    """The KV groups of the layers, one for each window; layers with the same window have the same causality."""
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
    """The projection that gives the keys and values of all layers at once: [layers * (key + value), hidden]."""
    pairs = [layer.qkv.rows(slice(body.query_size, None)) for layer in parameters.layers]
    biases = [pair.bias for pair in pairs if pair.bias is not None]
    return Linear(weight=stacked([pair.weight for pair in pairs]), bias=torch.cat(biases) if biases else None)


# ---- checkpoints ---------------------------------------------------------------------------------------

ARCHITECTURES = ("DFlashDraftModel",)
SPECULATORS_TYPE = "dflash"
Z_LAB_IDS, SPECULATORS_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"
BLOCK_SIZE_MAX = 1024
HARMLESS = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")


def is_dflash(files: DrafterFiles) -> bool:
    """Whether the configuration says that this is a DFlash drafter."""
    kind = files.config.fields.get("speculators_model_type")
    return kind == SPECULATORS_TYPE if kind is not None else files.architecture in ARCHITECTURES


def written_ids(files: DrafterFiles) -> fit.LayerIds:
    if files.config.has("speculators_model_type"):
        return fit.LayerIds(SPECULATORS_IDS, 1)
    return fit.LayerIds(Z_LAB_IDS, 0)


def load_dflash(name: str, settings: DrafterSettings) -> DFlash:
    """Loads a checkpoint by path or hub id. One that cannot belong to the target is refused before its weights are
    read."""
    opened = open_drafter(name)
    try:
        spec = read_spec(opened.files, settings)
    except ConfigError as problem:
        raise ModelError(f"{opened.files.config.source}: {problem}") from None
    return _load(opened, spec, settings)


def read_spec(files: DrafterFiles, settings: DrafterSettings) -> DFlashSpec:
    """The network that the checkpoint describes, checked against the target."""
    if (files.path / "mask_embedding.pt").is_file():
        raise ModelError(
            f"{files.path} keeps the embedding of its mask in mask_embedding.pt, which is not read, since such files "
            "can run code; store the embedding in the drafter's own embed_tokens.weight"
        )
    config = files.config
    kind = config.fields.get("speculators_model_type")
    if kind is not None:
        if kind != SPECULATORS_TYPE:
            raise ModelError(
                f"{config.source}: speculators_model_type is {kind!r}, not {SPECULATORS_TYPE!r}; "
                "choose the method that this drafter was trained for"
            )
        return _speculators(files, settings)
    if files.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{config.source}: architecture {files.architecture!r} is not a DFlash drafter; "
            f"supported: {', '.join(ARCHITECTURES)}, and speculators_model_type {SPECULATORS_TYPE!r}"
        )
    return _z_lab(files, settings)


def _z_lab(files: DrafterFiles, settings: DrafterSettings) -> DFlashSpec:
    config = files.config
    inner = config.fields.get("dflash_config")
    if not isinstance(inner, dict):
        raise ModelError(f"{config.source} has no dflash_config, which names the mask token and the target's layers")
    fields = config.inner("dflash_config", inner)
    for name, plain in (("use_swa", False), ("attention_sink_bias", False)):
        if fields.flag(name, plain) != plain:
            raise ModelError(f"{fields.source}: {name} is not supported")
    # Newer files have block_size inside dflash_config.
    where = fields if fields.has("block_size") else config
    scale = _number(config, fields, "input_embedding_scale", 1.0)
    if _number(config, fields, "output_multiplier", 1.0) != 1.0:
        raise ModelError(f"{config.source}: output_multiplier is not supported")
    softcap = None
    cap_in = fields if fields.has("final_logit_softcapping") else config
    if cap_in.number("final_logit_softcapping", 0.0):  # here 0 means no cap
        softcap = cap_in.soft_cap("final_logit_softcapping")
    body = _body(config, embedding_scale=scale, logit_softcap=softcap)
    return _spec(
        files,
        settings,
        body,
        causal=causality(config, fields, body),
        anchored=False,
        names=fields,
        block=where,
    )


def _speculators(files: DrafterFiles, settings: DrafterSettings) -> DFlashSpec:
    config = files.config
    for name in ("sample_from_anchor", "shift_label"):
        if config.flag(name, False):
            raise ModelError(f"{config.source}: {name} is not supported: rows must predict their own position")
    projector = config.fields.get("projector_type") or SPECULATORS_TYPE
    if projector != SPECULATORS_TYPE:
        raise ModelError(f"{config.source}: projector_type {projector!r} is not supported")
    body = _body(files.body())
    both_ways = config.flag("sliding_window_non_causal", False)
    return _spec(
        files,
        settings,
        body,
        causal=tuple(layer.window is not None and not both_ways for layer in body.layers),
        anchored=True,
        names=config,
        block=config,
    )


def causality(config: ConfigReader, fields: ConfigReader, body: DecoderSpec) -> tuple[bool, ...]:
    """The causality of each layer: what the file says of all layers; else layers with a window are causal."""
    for reader, name in ((config, "is_causal"), (fields, "causal")):
        if reader.has(name):
            return (reader.flag(name, False),) * len(body.layers)
    return tuple(layer.window is not None for layer in body.layers)


def _spec(
    files: DrafterFiles,
    settings: DrafterSettings,
    body: DecoderSpec,
    *,
    causal: tuple[bool, ...],
    anchored: bool,
    names: ConfigReader,
    block: ConfigReader,
) -> DFlashSpec:
    """Returns the checked spec. `names` is the part of the configuration that names the mask token and the target's
    layers, `block` the part with the sizes of blocks."""
    config, ids = files.config, written_ids(files)
    fit.check_hidden_size(config, body.hidden_size, settings)
    fit.check_vocabulary(config, body.vocab_size, settings)
    fit.check_layer_count(config, settings)
    taps = fit.checked_taps(names, ids.field, names.integer_list(ids.field), ids.offset, settings)
    fit.check_fuse(files, body.hidden_size, taps)
    block_size = block.integer("block_size")
    if not 2 <= block_size <= BLOCK_SIZE_MAX:
        raise block.wrong("block_size", f"at least 2, the last token and one mask, and at most {BLOCK_SIZE_MAX}")
    smaller = sorted(set(block.integer_list("smaller_block_sizes")))
    if smaller and not 2 <= smaller[0] <= smaller[-1] < block_size:
        raise block.wrong("smaller_block_sizes", f"sizes of at least 2, below block_size ({block_size})")
    return DFlashSpec(
        body=body,
        causal=causal,
        anchored=anchored,
        taps=taps,
        mask_token=fit.check_token(names, "mask_token_id", settings),
        block_size=block_size,
        smaller_blocks=tuple(smaller),
    )


def _body(config: ConfigReader, *, embedding_scale: float = 1.0, logit_softcap: float | None = None) -> DecoderSpec:
    fit.check_rope(config)
    fields = common_fields(config)
    bias = config.flag("attention_bias", False)
    layers = make_layers(config, head_dim=fields["head_dim"], window=fit.windows(config))
    # Whether the drafter has a head of its own shows in its tensors; the target's is never tied to its embedding.
    fields["tied_head"] = False
    return DecoderSpec(
        family="DFlash",
        layers=layers,
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        embedding_scale=embedding_scale,
        logit_softcap=logit_softcap,
        **fields,
    )


def _number(config: ConfigReader, fields: ConfigReader, name: str, default: float) -> float:
    return (fields if fields.has(name) else config).number(name, default)


def _load(opened: OpenedDrafter, spec: DFlashSpec, settings: DrafterSettings) -> DFlash:
    files, body = opened.files, spec.body
    draft_vocab_size = files.config.integer("draft_vocab_size", body.vocab_size)
    vocabulary = fit.draft_vocabulary(files, draft_vocab_size, settings)
    hidden = body.hidden_size
    layout: Layout = {
        "fuse": whole("fc.weight", (hidden, hidden * len(spec.taps))),
        "context_norm": whole("hidden_norm.weight", (hidden,)),
        "final_norm": whole("norm.weight", (hidden,)),
        **fit.own_tensors(files, body, draft_vocab_size, settings),
    }
    for number, layer in enumerate(body.layers):
        layout |= layer_layout(body, layer, f"layers.{number}", f"layers.{number}")
    filled = files.fill(layout, settings, what="a DFlash drafter", harmless=lambda name: name in HARMLESS)
    head = fit.head_of(filled, settings)
    if "head.weight" not in filled:
        frequent = read_frequent(files.path, settings)
        if frequent is not None:
            head, vocabulary = limit_to(frequent, head, settings)
    elif settings.draft_vocab_size:
        raise ConfigError(
            f"speculative_config: draft_vocab_size is {settings.draft_vocab_size}, but {files.path} has a head of its "
            "own, which fixes its tokens; leave draft_vocab_size out"
        )
    parameters = DFlashParameters(
        body=DecoderParameters(
            embedding=fit.embedding_of(filled, settings),
            layers=layers_from(body.layers, filled),
            final_norm=filled["final_norm"],
            head=head,
        ),
        fuse=Linear(weight=filled["fuse"]),
        context_norm=filled["context_norm"],
        vocabulary=vocabulary,
    )
    return DFlash(spec, parameters, settings, name=opened.name, fingerprint=settings.fingerprint(opened.fingerprint))


DFLASH = DrafterMethod(
    name="dflash",
    title="DFlash",
    archetype=ARCHETYPES["block_from_taps"],
    load=lambda config, settings: load_dflash(named_checkpoint(config, settings), settings),
    options=frozenset({"model", "draft_vocab_size", "pack_weights", "draft_confidence"}),
    trained_k=7,
    recognises=is_dflash,
    layer_ids=written_ids,
    training=Training.BLOCK,
)
