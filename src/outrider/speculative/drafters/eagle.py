"""EAGLE: one layer ahead of the target. Version 1 joins embedding and features; version 3 attends over both.

Checkpoints are read in the original layouts of both versions and in the speculators layout of version 3. In all of
them layer id i stands for the input of target layer i, which is tap i - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.backends.base import Backend
from outrider.errors import ConfigError, ModelError
from outrider.kv.archetypes import ARCHETYPES
from outrider.models.parameters import DecoderParameters, Linear, Matrix
from outrider.models.recipes.base import common_fields, make_layers
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.layout import Layout, layer_layout, whole
from outrider.models.spec import DecoderSpec
from outrider.models.weights.base import layers_from
from outrider.speculative.checkpoints import fit
from outrider.speculative.checkpoints.source import DrafterFiles, named_checkpoint, open_drafter
from outrider.speculative.drafters.ahead import AheadNetwork, Entrance, JoinedEntrance, OneLayerAhead, side_by_side
from outrider.speculative.method import DrafterMethod, Training
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WideEntrance(Entrance):
    """The entrance of version 3: queries, keys and values are projected from embedding and features side by side, each
    normed."""

    fuse: Linear
    """Projects the taps, side by side, to one hidden state: [hidden, taps * hidden]."""
    taps_norm: Tensor | None
    """The norm over all taps before they are fused, if there is one."""
    embedding_norm: Tensor
    feature_norm: Tensor
    normed_residual: bool
    """Whether the residual is the normed features, rather than the features themselves."""
    eps: float

    def mapped(self, change: Callable[[Matrix], Matrix]) -> Entrance:
        return replace(self, fuse=self.fuse.mapped(change))

    def features(self, taps: Tensor, backend: Backend) -> Tensor:
        if self.taps_norm is not None:
            taps = backend.norm(taps, self.taps_norm, self.eps)
        return backend.project(taps, self.fuse)

    def enter(self, embedded: Tensor, features: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
        normed = backend.norm(features, self.feature_norm, self.eps)
        wide = side_by_side(backend.norm(embedded, self.embedding_norm, self.eps), normed, backend)
        return wide, (normed if self.normed_residual else features)


# ---- checkpoints ---------------------------------------------------------------------------------------

METHODS = {1: "eagle", 3: "eagle3"}
"""The method of each version."""
FIRST_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
THIRD_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
KNOWN_ARCHITECTURES = FIRST_ARCHITECTURES + THIRD_ARCHITECTURES
SPECULATORS_TYPE = "eagle3"
IDS = "eagle_aux_hidden_state_layer_ids"
THIRD_MARK = "layers.0.hidden_norm.weight"
"""A tensor that only version 3 has: it norms the features inside the layer."""
HARMLESS = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")


def version_of(files: DrafterFiles) -> int | None:
    """The version of a checkpoint, by its tensors; None if it is not an EAGLE drafter."""
    if "fc.weight" not in files.tensors:
        return None
    kind = files.config.fields.get("speculators_model_type")
    named = kind == SPECULATORS_TYPE if kind is not None else files.architecture in (None, *KNOWN_ARCHITECTURES)
    return (3 if THIRD_MARK in files.tensors else 1) if named else None


def written_ids(files: DrafterFiles) -> fit.LayerIds | None:
    """How the configuration names the taps; None for version 1, which always reads the last layer."""
    return fit.LayerIds(IDS, 1) if THIRD_MARK in files.tensors else None


def load_eagle(name: str, settings: DrafterSettings, *, version: int) -> OneLayerAhead:
    """Loads a checkpoint by path or hub id. One that cannot belong to the target is refused before its weights are
    read."""
    opened = open_drafter(name)
    files = opened.files
    try:
        _check_version(files, version)
        network = _first(files, settings) if version == 1 else _third(files, settings)
    except ConfigError as problem:
        raise ModelError(f"{files.config.source}: {problem}") from None
    fingerprint = settings.fingerprint(opened.fingerprint)
    return OneLayerAhead(network, settings, method=METHODS[version], name=opened.name, fingerprint=fingerprint)


def _check_version(files: DrafterFiles, version: int) -> None:
    config = files.config
    kind = config.fields.get("speculators_model_type")
    if kind is not None and kind != SPECULATORS_TYPE:
        raise ModelError(
            f"{config.source}: speculators_model_type is {kind!r}, not {SPECULATORS_TYPE!r}; "
            "choose the method that this drafter was trained for"
        )
    if kind is None and files.architecture is not None and files.architecture not in KNOWN_ARCHITECTURES:
        raise ModelError(
            f"{config.source}: architecture {files.architecture!r} is not an EAGLE drafter; supported: "
            f"{', '.join(KNOWN_ARCHITECTURES)}, and speculators_model_type {SPECULATORS_TYPE!r}"
        )
    found = 3 if THIRD_MARK in files.tensors else 1
    if found != version:
        raise ModelError(
            f"{files.path} is a drafter of EAGLE version {found}, not {version}; use method {METHODS[found]!r}"
        )


def _body(config: ConfigReader, files: DrafterFiles) -> DecoderSpec:
    fit.check_rope(config)
    fields = common_fields(config)
    if config.integer("num_hidden_layers") != 1:
        raise ModelError(
            f"{config.source}: num_hidden_layers is {config.integer('num_hidden_layers')}; only drafters of one layer "
            "are supported: further layers would read KV while they are fed"
        )
    layers = make_layers(config, head_dim=fields["head_dim"], window=fit.windows(config))
    fields["tied_head"] = False
    return DecoderSpec(
        family="EAGLE",
        layers=layers,
        qkv_bias="layers.0.self_attn.q_proj.bias" in files.tensors
        or "layers.0.self_attn.qkv_proj.bias" in files.tensors,
        out_bias="layers.0.self_attn.o_proj.bias" in files.tensors,
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm="layers.0.self_attn.q_norm.weight" in files.tensors,
        **fields,
    )


def _checked_body(config: ConfigReader, files: DrafterFiles, settings: DrafterSettings) -> DecoderSpec:
    body = _body(config, files)
    fit.check_hidden_size(files.config, body.hidden_size, settings)
    fit.check_vocabulary(files.config, body.vocab_size, settings)
    fit.check_layer_count(files.config, settings)
    return body


# ---- version 1 -----------------------------------------------------------------------------------------


def _first(files: DrafterFiles, settings: DrafterSettings) -> AheadNetwork:
    """The network of version 1. It has no norm before or after the layer: its output replaces the target's normed
    hidden state."""
    target = settings.target
    body = _checked_body(files.config, files, settings)
    hidden = body.hidden_size
    layout: Layout = {
        "join.weight": whole("fc.weight", (hidden, 2 * hidden)),
        **fit.own_tensors(files, body, body.vocab_size, settings),
        **layer_layout(body, body.layers[0], "layers.0", "layers.0"),
    }
    del layout["layers.0.input_norm"]
    if "fc.bias" in files.tensors:
        layout["join.bias"] = whole("fc.bias", (hidden,))
    filled = files.fill(layout, settings, what="an EAGLE drafter", harmless=lambda name: False)
    filled["layers.0.input_norm"] = filled["final_norm"] = torch.ones_like(target.parameters.final_norm)
    entrance = JoinedEntrance(
        join=Linear(weight=filled["join.weight"], bias=filled.get("join.bias")),
        target_norm=target.parameters.final_norm,
        target_eps=target.spec.norm_eps,
        eps=body.norm_eps,
    )
    taps = fit.chosen_taps((len(target.spec.layers) - 1,), settings)
    vocabulary = DraftVocabulary(size=target.spec.vocab_size)
    return _network(body, filled, entrance, taps, vocabulary, settings, final_norm=False)


# ---- version 3 -----------------------------------------------------------------------------------------


def _third(files: DrafterFiles, settings: DrafterSettings) -> AheadNetwork:
    config = files.config
    body = _checked_body(files.body() if config.has("speculators_model_type") else config, files, settings)
    hidden = body.hidden_size
    taps = layer_ids(config, settings)
    fit.check_fuse(files, hidden, taps)
    draft_vocab_size = config.integer("draft_vocab_size", body.vocab_size)
    vocabulary = fit.draft_vocabulary(files, draft_vocab_size, settings)
    layout: Layout = {
        "fuse": whole("fc.weight", (hidden, hidden * len(taps))),
        "feature_norm": whole(THIRD_MARK, (hidden,)),
        "final_norm": whole("norm.weight", (hidden,)),
        **fit.own_tensors(files, body, draft_vocab_size, settings),
        **layer_layout(body, body.layers[0], "layers.0", "layers.0", input_size=2 * hidden),
    }
    inner = _inner(config)
    if (inner if inner.has("norm_before_fc") else config).flag("norm_before_fc", False):
        layout["taps_norm"] = whole("input_norm.weight", (hidden * len(taps),))
    filled = files.fill(layout, settings, what="an EAGLE-3 drafter", harmless=lambda name: name in HARMLESS)
    entrance = WideEntrance(
        fuse=Linear(weight=filled["fuse"]),
        taps_norm=filled.get("taps_norm"),
        embedding_norm=filled["layers.0.input_norm"],
        feature_norm=filled["feature_norm"],
        normed_residual=config.flag("norm_before_residual", False),
        eps=body.norm_eps,
    )
    return _network(
        body, filled, entrance, taps, vocabulary, settings, carries_normed=config.flag("norm_output", False)
    )


def layer_ids(config: ConfigReader, settings: DrafterSettings) -> tuple[int, ...]:
    """The taps that the file names; without any, those that the first drafters of this version were trained with."""
    inner = _inner(config)
    reader = inner if inner.has(IDS) else config
    if reader.has(IDS):
        return fit.checked_taps(reader, IDS, reader.integer_list(IDS), 1, settings)
    count = len(settings.target.spec.layers)
    ids = [2, count // 2, count - 3]
    if min(ids) < 1:
        raise ModelError(
            f"{config.source} has no {IDS}, and the usual ones {ids} do not suit a target of {count} layers; "
            "add the ids that the drafter was trained with"
        )
    return fit.checked_taps(config, f"{IDS} (by default)", ids, 1, settings)


def _inner(config: ConfigReader) -> ConfigReader:
    inner = config.fields.get("eagle_config")
    return config.inner("eagle_config", inner if isinstance(inner, dict) else {})


def _network(
    body: DecoderSpec,
    filled: Mapping[str, Tensor],
    entrance: Entrance,
    taps: tuple[int, ...],
    vocabulary: DraftVocabulary,
    settings: DrafterSettings,
    *,
    final_norm: bool = True,
    carries_normed: bool = False,
) -> AheadNetwork:
    parameters = DecoderParameters(
        embedding=fit.embedding_of(filled, settings),
        layers=layers_from(body.layers, filled),
        final_norm=filled["final_norm"],
        head=fit.head_of(filled, settings),
    )
    return AheadNetwork(
        body=body,
        parameters=parameters,
        entrance=entrance,
        taps=taps,
        vocabulary=vocabulary,
        final_norm=final_norm,
        carries_normed=carries_normed,
    )


OPTIONS = frozenset({"model", "pack_weights", "draft_confidence"})
EAGLE = DrafterMethod(
    name=METHODS[1],
    title="EAGLE",
    archetype=ARCHETYPES["chain_from_taps"],
    load=lambda config, settings: load_eagle(named_checkpoint(config, settings), settings, version=1),
    options=OPTIONS,
    trained_k=OneLayerAhead.default_k,
    recognises=lambda files: version_of(files) == 1,
    layer_ids=written_ids,
)
EAGLE3 = DrafterMethod(
    name=METHODS[3],
    title="EAGLE-3",
    archetype=ARCHETYPES["chain_from_taps"],
    load=lambda config, settings: load_eagle(named_checkpoint(config, settings), settings, version=3),
    options=OPTIONS,
    trained_k=OneLayerAhead.default_k,
    recognises=lambda files: version_of(files) == 3,
    layer_ids=written_ids,
    training=Training.CHAIN,
)
