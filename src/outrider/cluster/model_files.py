"""The files from which Dynamo's front end reads a model's text: written from the engine's own tokenizer and template,
so that both sides of a cluster agree, whatever form the model has."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from outrider.models.resolve import resolve_model
from outrider.models.text import ModelText, text_of_directory, text_of_gguf
from outrider.models.weights import GGUFCheckpoint, open_checkpoint


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    name: str
    """The name that is shown to users."""
    context_tokens: int
    directory: Path
    """Directory of the files, the same for workers of one model: the front end takes no two descriptions of it."""


def write_model_files(model: str, directory: Path, *, context_tokens: int | None) -> ModelFacts:
    """Write config.json, tokenizer.json and tokenizer_config.json of a model, without reading its weights."""
    resolved = resolve_model(model)
    checkpoint = open_checkpoint(resolved.path)
    spec = checkpoint.spec()
    if isinstance(checkpoint, GGUFCheckpoint):
        text = text_of_gguf(checkpoint.file)
    else:
        text = text_of_directory(checkpoint.path, checkpoint.config)
    limit = min(context_tokens or spec.max_position, spec.max_position)
    eos = [number for number in text.tokenizer.eos_ids if number < spec.vocab_size]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": limit,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "bos_token_id": text.tokenizer.bos_id,
        "eos_token_id": eos,
    }
    files = {
        "config.json": json.dumps(config),
        "tokenizer_config.json": json.dumps(_tokenizer_config(text, limit, eos)),
        "tokenizer.json": text.tokenizer.to_json(),
    }
    return ModelFacts(name=resolved.name, context_tokens=limit, directory=_write(files, directory))


def _write(files: Mapping[str, str], directory: Path) -> Path:
    """Write the files into a directory that is named for what is in them, unless it is there already."""
    digest = blake2b("".join(f"{name}\0{text}\0" for name, text in files.items()).encode(), digest_size=8).hexdigest()
    place = directory / digest
    if place.is_dir():
        return place
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        unfinished = Path(temporary) / "files"
        unfinished.mkdir()
        for name, text in files.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        # Another worker may have been faster.
        with suppress(OSError):
            unfinished.rename(place)
    return place


def _tokenizer_config(text: ModelText, limit: int, eos: list[int]) -> dict[str, object]:
    settings: dict[str, object] = {"model_max_length": limit, "tokenizer_class": "PreTrainedTokenizerFast"}
    template = text.chat_template
    if template is not None:
        settings |= template.variables
        named = template.templates
        settings["chat_template"] = (
            next(iter(named.values()))
            if len(named) == 1
            else [{"name": name, "template": source} for name, source in named.items()]
        )
    if eos and "eos_token" not in settings:
        settings["eos_token"] = text.tokenizer.token(eos[0])
    return settings
