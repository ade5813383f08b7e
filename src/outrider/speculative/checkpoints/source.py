"""A drafter's directory: configuration and tensors, under one spelling of their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import ModelError
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.layout import Layout, Part
from outrider.models.resolve import ModelKind, resolve_model, weights_fingerprint
from outrider.models.weights.base import StoredTensor, fill, rotary_buffer, stored_forms, taken
from outrider.models.weights.safetensors import TensorFiles, read_config
from outrider.speculative.settings import DrafterSettings

SPECULATORS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # The body is written without fields that have the value Transformers gives them.
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
    """Tensor names without `model.` in front, and with `layers.0` for a single middle layer."""

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
                raise ModelError(f"{path}: tensors {self._stored[name]} and {stored} are the same one; remove either")
            self._stored[name] = stored
            tensors[name] = about
        self.tensors: Mapping[str, StoredTensor] = tensors

    def stored_name(self, name: str) -> str:
        return self._stored.get(name, name)

    def copy_into(self, part: Part, destination: Tensor) -> None:
        destination.copy_(taken(self._files.mapped(self._stored[part.name]), part))

    def table(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        return self._files.mapped(self._stored[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor without which nothing else can be said."""
        if name not in self.tensors:
            raise ModelError(f"{self.path} has no tensor {name}, so it is no drafter of this kind")
        return self.tensors[name].shape

    @property
    def architecture(self) -> str | None:
        names = self.config.text_list("architectures")
        return names[0] if names else None

    def body(self) -> ConfigReader:
        """The configuration of the layers, in the layout where it is a part of the whole."""
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
        return fill(
            self,
            layout,
            what=what,
            harmless=lambda name: rotary_buffer(name) or harmless(name),
            dtype=settings.dtype,
            device=settings.device,
            forms=stored_forms(self, layout) if settings.as_stored else None,
            progress=None if progress is None else lambda done, total: progress("loading the drafter", done, total),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenedDrafter:
    files: DrafterFiles
    name: str
    fingerprint: str


def open_drafter(name: str) -> OpenedDrafter:
    """By path or hub id."""
    resolved = resolve_model(name, what="drafter")
    if resolved.kind is not ModelKind.DIRECTORY:
        raise ModelError(f"{resolved.path} is no directory: drafters are read from safetensors with their config.json")
    files = DrafterFiles(resolved.path)
    return OpenedDrafter(files=files, name=resolved.name, fingerprint=weights_fingerprint(resolved))
