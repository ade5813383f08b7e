"""From a drafting method's name to a drafter. A new method is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError, ModelError
from outrider.models.decoder import Decoder
from outrider.models.kv_groups import layer_groups
from outrider.models.load import LoadedModel, load_model
from outrider.models.resolve import ModelKind, packaged_drafter, resolve_model
from outrider.speculative.drafter import Drafter
from outrider.speculative.settings import DrafterSettings

__all__ = ["DrafterSettings", "draft_model_from", "guess_method", "load_drafter", "written_layer_ids"]


def _ngram(config: SpeculativeConfig, settings: DrafterSettings) -> Drafter:
    from outrider.speculative.drafters.ngram import NgramDrafter

    _refuse_meaningless(config, "draft_vocab_size", "pack_weights", "draft_confidence")

    return NgramDrafter(shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max)


def _draft_model(config: SpeculativeConfig, settings: DrafterSettings) -> Drafter:
    if config.model is None:
        raise ConfigError("speculative_config: method 'draft_model' needs 'model': a name or the path of a checkpoint")
    _refuse_meaningless(config, "draft_vocab_size", "pack_weights")
    progress = settings.progress
    report = None if progress is None else lambda done, total: progress("loading the draft model", done, total)
    model = load_model(
        config.model, dtype=settings.dtype, device=settings.device, progress=report, as_stored=settings.as_stored
    )
    return draft_model_from(model, settings, num_layers=config.num_hidden_layers)


def draft_model_from(model: LoadedModel, settings: DrafterSettings, *, num_layers: int | None = None) -> Drafter:
    """A drafter from a model that is loaded already."""
    from outrider.speculative.drafters.draft_model import DraftModel

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
                f"num_hidden_layers is {num_layers}, but the draft model {model.name} has {len(spec.layers)} layers"
            )
        spec = replace(spec, layers=spec.layers[:num_layers])
        parameters = replace(parameters, layers=parameters.layers[:num_layers])
        fingerprint = f"{fingerprint}/{num_layers}"
    limit = min(settings.max_model_len, spec.max_position)
    groups = layer_groups(spec, owner="draft", page_tokens=settings.page_tokens, item_bytes=settings.dtype.itemsize)
    decoder = Decoder(spec, parameters, settings.ops, max_position=limit)
    return DraftModel(
        decoder,
        groups,
        max_len=limit,
        fingerprint=fingerprint,
        target_vocab_size=settings.target.spec.vocab_size,
    )


def _dflash(config: SpeculativeConfig, settings: DrafterSettings) -> Drafter:
    from outrider.speculative.checkpoints.dflash import load_dflash

    return load_dflash(_checkpoint(config, settings), settings)


def _eagle(config: SpeculativeConfig, settings: DrafterSettings) -> Drafter:
    from outrider.speculative.checkpoints.eagle import load_eagle

    _refuse_meaningless(config, "draft_vocab_size")

    return load_eagle(_checkpoint(config, settings), settings, version=3 if config.method == "eagle3" else 1)


def _mtp(config: SpeculativeConfig, settings: DrafterSettings) -> Drafter:
    from outrider.speculative.checkpoints.mtp import load_mtp

    _refuse_meaningless(config, "draft_vocab_size")
    if config.model is not None:
        raise ConfigError(
            f"speculative_config: method 'mtp' uses the module inside the target's own checkpoint; drop 'model' "
            f"({config.model!r})"
        )
    return load_mtp(settings)


def _refuse_meaningless(config: SpeculativeConfig, *names: str) -> None:
    """What would be wished for in vain; wishing for none of it is fulfilled."""
    for name in names:
        if value := getattr(config, name):
            raise ConfigError(
                f"speculative_config: {name} is {value!r}, which method {config.method!r} cannot do; leave {name} out"
            )


def _checkpoint(config: SpeculativeConfig, settings: DrafterSettings) -> str:
    """What is named; else the drafter that is made for this target."""
    name = config.model or packaged_drafter(settings.target.name, config.method)
    if name is None:
        raise ConfigError(
            f"speculative_config: method {config.method!r} needs 'model': the name or path of a drafter's checkpoint "
            f"(none comes with Outrider for {settings.target.name})"
        )
    return name


LOADERS: dict[str, Callable[[SpeculativeConfig, DrafterSettings], Drafter]] = {
    "ngram": _ngram,
    "draft_model": _draft_model,
    "dflash": _dflash,
    "eagle": _eagle,
    "eagle3": _eagle,
    "mtp": _mtp,
}


def guess_method(name: str) -> str:
    """What a drafter's checkpoint is, by its configuration and its tensors. Paths and hub ids."""
    from outrider.speculative.checkpoints import dflash, eagle
    from outrider.speculative.checkpoints.source import open_drafter

    if resolve_model(name).kind is not ModelKind.DIRECTORY:
        return "draft_model"
    files = open_drafter(name).files
    if dflash.is_dflash(files):
        return "dflash"
    version = eagle.version_of(files)
    if version is not None:
        return "eagle3" if version == 3 else "eagle"
    if "embed_tokens.weight" in files.tensors and "fc.weight" not in files.tensors:
        return "draft_model"
    raise ModelError(
        f"{files.config.source} does not say what kind of drafter this is (architecture {files.architecture!r}); "
        f"name the method: {', '.join(LOADERS)}"
    )


def written_layer_ids(config: SpeculativeConfig, settings: DrafterSettings, taps: Sequence[int]) -> str | None:
    """How the drafter's config.json would name these taps; None where no file says which layers are read."""
    from outrider.speculative.checkpoints import dflash, eagle
    from outrider.speculative.checkpoints.source import open_drafter

    spelling = {"dflash": dflash.written_ids, "eagle": eagle.written_ids, "eagle3": eagle.written_ids}
    if config.method not in spelling:
        return None
    ids = spelling[config.method](open_drafter(_checkpoint(config, settings)).files)
    return None if ids is None else ids.written(taps)


def load_drafter(config: SpeculativeConfig, settings: DrafterSettings) -> Drafter:
    loader = LOADERS.get(config.method)
    if loader is None:
        raise ConfigError(f"speculative_config: unknown method {config.method!r}; known methods: {', '.join(LOADERS)}")
    return loader(config, settings)
