"""Opening a drafter's checkpoint: its configuration, and its tensors under one spelling of their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError, ModelError
from outrider.models.parameters import plain
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.layout import Layout, Part
from outrider.models.resolve import ModelKind, packaged_drafter, resolve_model, weights_fingerprint
from outrider.models.weights.base import StoredTensor, fill, rotary_buffer, taken
from outrider.models.weights.safetensors import TensorFiles, read_config
from outrider.speculative.settings import DrafterSettings

SPECULATORS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # The layers are described without the fields that have Transformers' default values.
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
}


class DrafterFiles:
    """The files of a checkpoint. Tensor names lose a leading `model.`, and a single `midlayer` becomes `layers.0`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config, source = read_config(path)
        self.config = ConfigReader(config, source)
        self._files = TensorFiles(path, integers=True)
        self._stored: dict[str, str] = {}
        tensors: dict[str, StoredTensor] = {}
        for stored, about in self._files.tensors.items():
            name = stored.removeprefix("model.")
            if name.startswith("midlayer."):
                name = f"layers.0.{name.removeprefix('midlayer.')}"
            if name in tensors:
                raise ModelError(
                    f"{path}: tensors {self._stored[name]} and {stored} are the same tensor; remove one of them"
                )
            self._stored[name] = stored
            tensors[name] = about
        self.tensors: Mapping[str, StoredTensor] = tensors

    def stored_name(self, name: str) -> str:
        return self._stored.get(name, name)

    def copy_into(self, part: Part, destination: Tensor) -> None:
        destination.copy_(taken(self._files.mapped(self._stored[part.name]), part))

    def table(self, name: str) -> Tensor:
        """Returns a tensor as it is stored."""
        return self._files.mapped(self._stored[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that every drafter of this kind has."""
        if name not in self.tensors:
            raise ModelError(f"{self.path} has no tensor {name}, so it is not a drafter of this kind")
        return self.tensors[name].shape

    @property
    def architecture(self) -> str | None:
        names = self.config.text_list("architectures")
        return names[0] if names else None

    def body(self) -> ConfigReader:
        """The configuration of the layers in the speculators layout, where it is nested."""
        config = self.config
        inner = config.fields.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise ModelError(f"{config.source} has no transformer_layer_config, which describes the drafter's layers")
        kind = inner.get("model_type", "llama")
        known = SPECULATORS_DEFAULTS.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise ModelError(
                f"{config.source}: layers of model_type {kind!r} are not supported; "
                f"supported: {', '.join(SPECULATORS_DEFAULTS)}"
            )
        return config.inner("transformer_layer_config", {**known, **inner})

    def fill(
        self, layout: Layout, settings: DrafterSettings, *, what: str, harmless: Callable[[str], bool]
    ) -> dict[str, Tensor]:
        progress = settings.progress
        filled = fill(
            self,
            layout,
            what=what,
            harmless=lambda name: rotary_buffer(name) or harmless(name),
            dtype=settings.dtype,
            device=settings.device,
            forms=settings.forms,
            progress=None if progress is None else lambda done, total: progress("loading the drafter", done, total),
        )
        return {path: plain(tensor) for path, tensor in filled.items()}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenedDrafter:
    files: DrafterFiles
    name: str
    fingerprint: str


def open_drafter(name: str) -> OpenedDrafter:
    """Opens a checkpoint by path or hub id."""
    resolved = resolve_model(name, what="drafter")
    if resolved.kind is not ModelKind.DIRECTORY:
        raise ModelError(
            f"{resolved.path} is not a directory: drafters are read from a directory with safetensors and config.json"
        )
    files = DrafterFiles(resolved.path)
    return OpenedDrafter(files=files, name=resolved.name, fingerprint=weights_fingerprint(resolved))


def named_checkpoint(config: SpeculativeConfig, settings: DrafterSettings) -> str:
    """The name or path of the drafter's checkpoint: the one that is configured, else the one made for this target."""
    name = config.model or packaged_drafter(settings.target.name, config.method)
    if name is None:
        raise ConfigError(
            f"speculative_config: method {config.method!r} needs 'model': the name or path of a drafter's checkpoint "
            f"(none comes with Outrider for {settings.target.name})"
        )
    return name
