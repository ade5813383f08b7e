"""MTP: a module inside the target's own checkpoint that predicts the token after next, applied k times.

Checkpoints are read in two public layouts; norms and layers are stored as the target's own are.

    DeepSeek-V3    behind the last layer: model.layers.L.{enorm, hnorm, eh_proj, shared_head.…} beside a layer's tensors
    Qwen3-Next     beside the model: mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.0.…
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from outrider.errors import ModelError
from outrider.kv.archetypes import ARCHETYPES
from outrider.models.parameters import DecoderParameters, Linear, plain
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.layout import Layout, Part, layer_layout, whole
from outrider.models.weights.base import StoredTensor, fill, layers_from, rotary_buffer, taken
from outrider.models.weights.safetensors import TensorFiles, read_config
from outrider.speculative.checkpoints import fit
from outrider.speculative.drafters.ahead import AheadNetwork, JoinedEntrance, OneLayerAhead
from outrider.speculative.method import DrafterMethod
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary


class Mtp(OneLayerAhead):
    def __init__(self, network: AheadNetwork, settings: DrafterSettings, *, name: str, fingerprint: str) -> None:
        super().__init__(network, settings, method="mtp", name=name, fingerprint=fingerprint)


# ---- checkpoints ---------------------------------------------------------------------------------------

LATENT_ATTENTION = "self_attn.kv_a_proj_with_mqa.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleNames:
    """The names that a layout gives to the tensors of a module."""

    prefix: str
    layer: str
    """The prefix of the names of its layer's tensors."""
    join: str
    embedding_norm: str
    feature_norm: str
    final_norm: str
    copies: tuple[str, ...]
    """Names of copies of the target's own embedding and head, which are not read."""
    carries_normed: bool


class ModuleFiles:
    """The tensors of a target's checkpoint whose names begin with a prefix."""

    def __init__(self, path: Path, files: TensorFiles, prefix: str) -> None:
        self.path = path
        self._files = files
        self.tensors: Mapping[str, StoredTensor] = {
            name: about for name, about in files.tensors.items() if name.startswith(prefix)
        }

    def copy_into(self, part: Part, destination: Tensor) -> None:
        destination.copy_(taken(self._files.mapped(part.name), part))

    def stored_name(self, name: str) -> str:
        return name


def load_mtp(settings: DrafterSettings) -> Mtp:
    """Loads the module of the target, which is loaded already."""
    target = settings.target
    if target.path is None or not target.path.is_dir():
        raise ModelError(
            f"the target {target.name} is not a directory of safetensors, and only these contain an MTP "
            "module; choose another method"
        )
    if target.spec.post_norms or target.spec.sinks:
        raise ModelError(
            f"MTP modules of {target.spec.family} models such as {target.name} are not supported; choose another method"
        )
    config = ConfigReader(*read_config(target.path))
    files = TensorFiles(target.path)
    names = _names(config, files, len(target.spec.layers), target.name)
    module = ModuleFiles(target.path, files, names.prefix)
    if f"{names.layer}{LATENT_ATTENTION}" in module.tensors:
        raise ModelError(
            f"{target.path}: the MTP module attends over latent keys and values ({names.layer}{LATENT_ATTENTION}), "
            "which is not supported; choose another method"
        )
    return Mtp(
        _network(module, names, settings),
        settings,
        name=target.name,
        fingerprint=settings.fingerprint(f"{target.fingerprint}/module"),
    )


def _names(config: ConfigReader, files: TensorFiles, layers: int, target: str) -> ModuleNames:
    behind = f"model.layers.{layers}."
    if f"{behind}eh_proj.weight" in files.tensors:
        _check_one(config, "num_nextn_predict_layers")
        return ModuleNames(
            prefix=behind,
            layer=behind,
            join=f"{behind}eh_proj.weight",
            embedding_norm=f"{behind}enorm.weight",
            feature_norm=f"{behind}hnorm.weight",
            final_norm=f"{behind}shared_head.norm.weight",
            copies=(f"{behind}embed_tokens.weight", f"{behind}shared_head.head.weight"),
            carries_normed=False,
        )
    if "mtp.fc.weight" in files.tensors:
        _check_one(config, "mtp_num_hidden_layers")
        _check_one(config, "num_nextn_predict_layers")
        if any(name.startswith("mtp.layers.1.") for name in files.tensors):
            raise ModelError(
                f"{config.source}: the MTP module has several layers (mtp.layers.1.…), but only one is supported; "
                "choose another method"
            )
        return ModuleNames(
            prefix="mtp.",
            layer="mtp.layers.0.",
            join="mtp.fc.weight",
            embedding_norm="mtp.pre_fc_norm_embedding.weight",
            feature_norm="mtp.pre_fc_norm_hidden.weight",
            final_norm="mtp.norm.weight",
            copies=("mtp.embed_tokens.weight", "mtp.lm_head.weight"),
            carries_normed=True,
        )
    raise ModelError(
        f"the target {target} has no MTP module (neither {behind}eh_proj.weight nor "
        "mtp.fc.weight is in its checkpoint); choose another method"
    )


def _check_one(config: ConfigReader, name: str) -> None:
    count = config.integer(name, 1)
    if count != 1:
        raise ModelError(
            f"{config.source}: {name} is {count}, but only one MTP module, applied k times, is supported; "
            "choose another method"
        )


def _network(module: ModuleFiles, names: ModuleNames, settings: DrafterSettings) -> AheadNetwork:
    target = settings.target
    spec, hidden = target.spec, target.spec.hidden_size
    last = spec.layers[-1]
    dense = f"{names.layer}mlp.gate.weight" not in module.tensors
    body = replace(spec, layers=(replace(last, window=None, experts=None if dense else last.experts),))
    layout: Layout = {
        "join": whole(names.join, (hidden, 2 * hidden)),
        "embedding_norm": whole(names.embedding_norm, (hidden,)),
        "feature_norm": whole(names.feature_norm, (hidden,)),
        "final_norm": whole(names.final_norm, (hidden,)),
        **layer_layout(body, body.layers[0], "layers.0", names.layer.removesuffix(".")),
    }
    progress = settings.progress
    filled = fill(
        module,
        layout,
        what="an MTP module",
        harmless=lambda name: rotary_buffer(name) or name in names.copies,
        dtype=settings.dtype,
        device=settings.device,
        progress=None if progress is None else lambda done, total: progress("loading the drafter", done, total),
    )
    entrance = JoinedEntrance(
        join=Linear(weight=filled["join"]),
        target_norm=target.parameters.final_norm,
        target_eps=spec.norm_eps,
        eps=spec.norm_eps,
        embedding_norm=plain(filled["embedding_norm"]),
        feature_norm=plain(filled["feature_norm"]),
        input_norm=plain(filled["layers.0.input_norm"]),
    )
    return AheadNetwork(
        body=body,
        parameters=DecoderParameters(
            embedding=fit.embedding_of({}, settings),
            layers=layers_from(body.layers, filled),
            final_norm=plain(filled["final_norm"]),
            head=fit.head_of({}, settings),
        ),
        entrance=entrance,
        taps=fit.chosen_taps((len(spec.layers) - 1,), settings),
        vocabulary=DraftVocabulary(size=spec.vocab_size),
        carries_normed=names.carries_normed,
    )


MTP = DrafterMethod(
    name="mtp",
    title="MTP",
    archetype=ARCHETYPES["chain_from_taps"],
    load=lambda config, settings: load_mtp(settings),
    options=frozenset({"pack_weights", "draft_confidence"}),
)
