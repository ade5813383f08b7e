"""DFlash checkpoints in both public layouts, into one form.

z-lab          a Qwen3-like config.json with `dflash_config`; layer id i is what leaves target layer i
speculators    `transformer_layer_config` for the layers; layer id i is what enters target layer i
"""

from __future__ import annotations

from outrider.errors import ConfigError, ModelError
from outrider.models.parameters import DecoderParameters, Linear
from outrider.models.recipes.base import common_fields, make_layers
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.layout import Layout, layer_layout, whole
from outrider.models.spec import DecoderSpec
from outrider.models.weights.base import layers_from
from outrider.speculative.checkpoints import fit
from outrider.speculative.checkpoints.frequent import limit_to, read_frequent
from outrider.speculative.checkpoints.source import DrafterFiles, OpenedDrafter, open_drafter
from outrider.speculative.drafters.dflash import DFlash, DFlashParameters, DFlashSpec
from outrider.speculative.settings import DrafterSettings

ARCHITECTURES = ("DFlashDraftModel",)
SPECULATORS_TYPE = "dflash"
Z_LAB_IDS, SPECULATORS_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"
BLOCK_SIZE_MAX = 1024
HARMLESS = ("t2d", "d2t", "verifier_norm.weight", "verifier_lm_head.weight")


def is_dflash(files: DrafterFiles) -> bool:
    """By what the configuration says of itself."""
    kind = files.config.fields.get("speculators_model_type")
    return kind == SPECULATORS_TYPE if kind is not None else files.architecture in ARCHITECTURES


def written_ids(files: DrafterFiles) -> fit.LayerIds:
    if files.config.has("speculators_model_type"):
        return fit.LayerIds(SPECULATORS_IDS, 1)
    return fit.LayerIds(Z_LAB_IDS, 0)


def load_dflash(name: str, settings: DrafterSettings) -> DFlash:
    """By path or hub id. What cannot belong to the target is refused before weights are read."""
    opened = open_drafter(name)
    try:
        spec = read_spec(opened.files, settings)
    except ConfigError as problem:
        raise ModelError(f"{opened.files.config.source}: {problem}") from None
    return _load(opened, spec, settings)


def read_spec(files: DrafterFiles, settings: DrafterSettings) -> DFlashSpec:
    """What the checkpoint describes, checked against the target."""
    if (files.path / "mask_embedding.pt").is_file():
        raise ModelError(
            f"{files.path} keeps the embedding of its mask in mask_embedding.pt, which is not read, since such files "
            "can run code"
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
    # Newer files have it inside.
    where = fields if fields.has("block_size") else config
    scale = _number(config, fields, "input_embedding_scale", 1.0)
    if _number(config, fields, "output_multiplier", 1.0) != 1.0:
        raise ModelError(f"{config.source}: output_multiplier is not supported")
    # 0 means none here.
    softcap = None
    if _number(config, fields, "final_logit_softcapping", 0.0):
        softcap = _which(config, fields, "final_logit_softcapping").soft_cap("final_logit_softcapping")
    body = _body(config, embedding_scale=scale, logit_softcap=softcap)
    return _spec(
        files,
        settings,
        body,
        causal=causality(config, fields, body),
        anchored=False,
        ids=(fields, Z_LAB_IDS, 0),
        mask=(fields, "mask_token_id"),
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
        ids=(config, SPECULATORS_IDS, 1),
        mask=(config, "mask_token_id"),
        block=config,
    )


def causality(config: ConfigReader, fields: ConfigReader, body: DecoderSpec) -> tuple[bool, ...]:
    """Per layer: what the file says of all layers; where it says nothing, layers with a window are causal."""
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
    ids: tuple[ConfigReader, str, int],
    mask: tuple[ConfigReader, str],
    block: ConfigReader,
) -> DFlashSpec:
    config = files.config
    fit.check_hidden_size(config, body.hidden_size, settings)
    fit.check_vocabulary(config, body.vocab_size, settings)
    fit.check_layer_count(config, settings)
    reader, name, offset = ids
    taps = fit.checked_taps(reader, name, reader.integer_list(name), offset, settings)
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
        mask_token=fit.check_token(mask[0], mask[1], mask[0].integer(mask[1]), settings),
        block_size=block_size,
        smaller_blocks=tuple(smaller),
    )


def _body(config: ConfigReader, *, embedding_scale: float = 1.0, logit_softcap: float | None = None) -> DecoderSpec:
    fit.check_rope(config)
    fields = common_fields(config)
    bias = config.flag("attention_bias", False)
    layers = make_layers(config, head_dim=fields["head_dim"], window=fit.windows(config))
    # The head's name in the file says whether there is one; the target's is never tied to a drafter's embedding.
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
    return _which(config, fields, name).number(name, default)


def _which(config: ConfigReader, fields: ConfigReader, name: str) -> ConfigReader:
    return fields if fields.has(name) else config


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
            "own, which has chosen its tokens; leave draft_vocab_size out"
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
