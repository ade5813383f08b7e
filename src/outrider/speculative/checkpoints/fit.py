"""Whether a drafter's checkpoint belongs to this target. One that does not is refused, with both values and what to
do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ConfigError, ModelError
from outrider.models.parameters import Linear, Matrix
from outrider.models.recipes.base import optional_window, window_of, windows_by_layer_type
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.layout import Layout, whole
from outrider.models.spec import DecoderSpec
from outrider.speculative.checkpoints.source import DrafterFiles
from outrider.speculative.settings import DrafterSettings
from outrider.speculative.vocabulary import DraftVocabulary

INTERLEAVED = ("rope_interleave", "rope_interleaved", "interleaved_rope")


def check_hidden_size(config: ConfigReader, hidden_size: int, settings: DrafterSettings) -> None:
    target = settings.target
    for name, found in (
        ("hidden_size", hidden_size),
        ("target_hidden_size", config.integer("target_hidden_size", target.spec.hidden_size)),
    ):
        if found != target.spec.hidden_size:
            raise ModelError(
                f"{config.source}: {name} is {found}, but the target {target.name} has {target.spec.hidden_size}; "
                "use a drafter that was trained for this target"
            )


def check_vocabulary(config: ConfigReader, vocab_size: int, settings: DrafterSettings) -> None:
    """Checks that drafter and target have the same tokens, apart from padding."""
    target = settings.target
    least = min(target.spec.vocab_size, target.tokenizer.vocab_size)
    if vocab_size < least:
        raise ModelError(
            f"{config.source}: vocab_size is {vocab_size}, but the target {target.name} has {least} tokens; "
            "use a drafter that was trained for this target"
        )
    if vocab_size > target.spec.vocab_size + max(1024, target.spec.vocab_size // 8):
        raise ModelError(
            f"{config.source}: vocab_size is {vocab_size}, far above the {target.spec.vocab_size} tokens of the target "
            f"{target.name}; use a drafter that was trained for this target"
        )


def check_token(config: ConfigReader, name: str, settings: DrafterSettings) -> int:
    """Returns a token id of the configuration if the target's embedding, which the drafter uses, has a row for it."""
    token, size = config.integer(name), settings.target.spec.vocab_size
    if not 0 <= token < size:
        raise ModelError(
            f"{config.source}: {name} is {token}, outside the {size} tokens that the target {settings.target.name} "
            "embeds; use a drafter that was trained for this target"
        )
    return token


def check_layer_count(config: ConfigReader, settings: DrafterSettings) -> None:
    have = len(settings.target.spec.layers)
    wanted = config.integer("num_target_layers", have)
    if wanted != have:
        raise ModelError(
            f"{config.source}: num_target_layers is {wanted}, but the target {settings.target.name} has {have} layers; "
            "use a drafter that was trained for this target"
        )


def checked_taps(
    config: ConfigReader, name: str, ids: Sequence[int], offset: int, settings: DrafterSettings
) -> tuple[int, ...]:
    """Returns the layer ids of a checkpoint as taps. Tap i is the output of layer i; the checkpoint's id of it is
    i + `offset`."""
    count = len(settings.target.spec.layers)
    taps = tuple(number - offset for number in ids)
    wrong = [number for number, tap in zip(ids, taps, strict=True) if not 0 <= tap < count]
    if wrong or not ids:
        raise ModelError(
            f"{config.source}: {name} {list(ids)} must be layers {offset} to {count - 1 + offset} of the target "
            f"{settings.target.name}, which has {count}"
        )
    return chosen_taps(taps, settings)


def chosen_taps(taps: tuple[int, ...], settings: DrafterSettings) -> tuple[int, ...]:
    """Returns the taps of the settings if they name any, which must be as many; else those of the checkpoint."""
    if settings.taps is None:
        return taps
    count = len(settings.target.spec.layers)
    if len(settings.taps) != len(taps) or not all(0 <= tap < count for tap in settings.taps):
        raise ConfigError(
            f"taps {list(settings.taps)} cannot replace {list(taps)}; name {len(taps)} of the layers 0 to {count - 1}"
        )
    return settings.taps


class LayerIds(NamedTuple):
    """How a checkpoint's config.json names its taps."""

    field: str
    offset: int
    """The checkpoint's id of tap i is i + offset."""

    def written(self, taps: Sequence[int]) -> str:
        """The line of config.json that names these taps."""
        return f'"{self.field}": {[tap + self.offset for tap in taps]}'


def check_rope(config: ConfigReader) -> None:
    """Refuses rotary embeddings over neighbouring elements: read as halves of a head they would run, but draft
    nonsense."""
    for name in INTERLEAVED:
        if config.has(name) and config.flag(name, False):
            raise ModelError(
                f"{config.source}: {name} is set, but the target rotates halves of a head, not neighbouring elements; "
                "such a drafter does not belong to it"
            )


def windows(config: ConfigReader) -> Callable[[int], int | None]:
    """Returns each layer's window: by `layer_types` or, without them, as Transformers reads the older fields."""
    types = config.text_list("layer_types")
    if types is not None:
        # Files that say which layers have a window do not all say that windows are in use.
        window = window_of(config) if "sliding_attention" in types else None
        return windows_by_layer_type(config, window, default=lambda _: False)
    if not config.flag("use_sliding_window", False):
        return lambda _: None
    window, first = optional_window(config), config.integer("max_window_layers", 28)
    return lambda number: window if number >= first else None


def check_fuse(files: DrafterFiles, hidden_size: int, taps: Sequence[int]) -> None:
    """Checks the number of taps against the width of fc, which shows how many the drafter was trained with."""
    shape = files.shape("fc.weight")
    if len(shape) != 2 or shape[1] != hidden_size * len(taps):
        raise ModelError(
            f"{files.path}: fc.weight is {list(shape)}, but {len(taps)} target layers of {hidden_size} elements make "
            f"{hidden_size * len(taps)} columns; the layer ids in its configuration are not those it was trained with"
        )


# ---- embedding, head and vocabulary: the drafter's own, or the target's -------------------------------


def own_tensors(files: DrafterFiles, body: DecoderSpec, draft_vocab_size: int, settings: DrafterSettings) -> Layout:
    """The layout of the embedding and the head, as far as the checkpoint has its own."""
    layout: Layout = {}
    if "embed_tokens.weight" in files.tensors:
        if body.vocab_size < settings.target.spec.vocab_size:
            raise ModelError(
                f"{files.path} embeds {body.vocab_size} tokens, but the target {settings.target.name} can write "
                f"{settings.target.spec.vocab_size}; use a drafter that was trained for this target"
            )
        layout["embedding"] = whole("embed_tokens.weight", (body.vocab_size, body.hidden_size))
    if "lm_head.weight" in files.tensors:
        layout["head.weight"] = whole("lm_head.weight", (draft_vocab_size, body.hidden_size))
    return layout


def embedding_of(filled: Mapping[str, Tensor], settings: DrafterSettings) -> Matrix:
    own = filled.get("embedding")
    return settings.target.parameters.embedding if own is None else own


def head_of(filled: Mapping[str, Tensor], settings: DrafterSettings) -> Linear:
    weight = filled.get("head.weight")
    return settings.target.parameters.head if weight is None else Linear(weight=weight)


def draft_vocabulary(files: DrafterFiles, draft_vocab_size: int, settings: DrafterSettings) -> DraftVocabulary:
    """The drafter's vocabulary. d2t holds, for each draft token, the difference between the target's id and its own."""
    size = settings.target.spec.vocab_size
    if "d2t" not in files.tensors:
        if draft_vocab_size < min(size, settings.target.tokenizer.vocab_size):
            raise ModelError(
                f"{files.path}: draft_vocab_size is {draft_vocab_size}, fewer than the target's {size} tokens, but "
                "there is no d2t that says which they are"
            )
        return DraftVocabulary(size=size)
    if files.shape("d2t") != (draft_vocab_size,):
        raise ModelError(
            f"{files.path}: d2t has shape {list(files.shape('d2t'))}, but draft_vocab_size is {draft_vocab_size}"
        )
    if "lm_head.weight" not in files.tensors:
        raise ModelError(f"{files.path} has d2t but no lm_head.weight, so its draft tokens cannot be scored")
    if draft_vocab_size < 1:
        raise ModelError(f"{files.path}: draft_vocab_size is {draft_vocab_size}, but at least one token is needed")
    ids = torch.arange(draft_vocab_size) + files.table("d2t").to(torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise ModelError(
            f"{files.path}: d2t leads to token {low if low < 0 else high}, outside the {size} tokens of the target "
            f"{settings.target.name}; use a drafter that was trained for this target"
        )
    if len(ids.unique()) != draft_vocab_size:
        raise ModelError(f"{files.path}: d2t leads to one target token from several draft tokens; the file is damaged")
    _check_t2d(files, ids)
    return DraftVocabulary(size=size, target_ids=ids.to(settings.device))


def _check_t2d(files: DrafterFiles, ids: Tensor) -> None:
    if "t2d" not in files.tensors:
        return
    marked = files.table("t2d").to(torch.bool).nonzero().flatten()
    if not torch.equal(marked, ids.sort().values):
        raise ModelError(f"{files.path}: t2d and d2t name different tokens; the file is damaged")
