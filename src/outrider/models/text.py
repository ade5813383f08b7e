"""What a model needs to read and write text: tokenizer, chat template, end-of-text ids, sampling defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ModelError
from outrider.models.chat import ChatTemplate
from outrider.models.tokenizer import Tokenizer, tokenizer_from_file
from outrider.models.tokenizer_gguf import tokenizer_from_gguf
from outrider.models.weights.gguf_file import GGUFFile
from outrider.models.weights.safetensors import read_json

SPECIAL_TOKENS = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """Sampling settings that the model's makers recommend; None for those that they leave open."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


# Names of the fields in GGUF.
GGUF_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
GGUF_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelText:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    generation: GenerationDefaults


def text_of_gguf(file: GGUFFile) -> ModelText:
    source, metadata = str(file.path), file.metadata
    tokenizer = tokenizer_from_gguf(metadata, source)
    variables = {}
    for name, gguf_name in GGUF_SPECIAL.items():
        number = metadata.get(f"tokenizer.ggml.{gguf_name}_token_id")
        token = tokenizer.token(number) if number is not None else None
        if token is not None:
            variables[f"{name}_token"] = token
    template = metadata.get("tokenizer.chat_template")
    sampling = {name: metadata.get(f"general.sampling.{gguf_name}") for name, gguf_name in GGUF_SAMPLING.items()}
    return ModelText(
        tokenizer=tokenizer,
        chat_template=ChatTemplate(template, source=source, variables=variables) if template else None,
        generation=_generation(sampling, source),
    )


def text_of_directory(directory: Path, config: Mapping[str, Any]) -> ModelText:
    settings = _read_optional(directory / "tokenizer_config.json")
    special = {f"{name}_token": _content(settings.get(f"{name}_token")) for name in SPECIAL_TOKENS}
    variables = {name: token for name, token in special.items() if token is not None}
    generation = _read_optional(directory / "generation_config.json")
    # generation_config.json takes precedence, as it does in Hugging Face.
    ids = _ids(generation.get("eos_token_id") if generation else config.get("eos_token_id"), directory)
    tokenizer = tokenizer_from_file(
        directory / "tokenizer.json",
        bos_token=variables.get("bos_token"),
        eos_token=variables.get("eos_token"),
        eos_ids=ids,
    )
    return ModelText(
        tokenizer=tokenizer,
        chat_template=_template(directory, settings, variables),
        generation=_generation(generation, str(directory / "generation_config.json")),
    )


def _template(directory: Path, settings: Mapping[str, Any], variables: Mapping[str, str]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as problem:
            raise ModelError(f"{path} cannot be read: {problem}") from None
        return ChatTemplate(text, source=str(path), variables=variables)
    found = settings.get("chat_template")
    if not found:
        return None
    source = str(directory / "tokenizer_config.json")
    try:
        templates = found if isinstance(found, str) else {str(each["name"]): str(each["template"]) for each in found}
    except (TypeError, KeyError):
        raise ModelError(f"{source}: chat_template must be a text, or a list of names and templates") from None
    return ChatTemplate(templates, source=source, variables=variables)


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """Returns the text of a special token, which is given as text or as an object that contains it."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _ids(value: Any, directory: Path) -> Iterable[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in ids):
        raise ModelError(f"{directory}: eos_token_id must be a token id or a list of them, got {value!r}")
    return ids


def _generation(fields: Mapping[str, Any], source: str) -> GenerationDefaults:
    known = {name: fields.get(name) for name in GGUF_SAMPLING}
    for name, value in known.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ModelError(f"{source}: {name} must be a number, got {value!r}")
    return GenerationDefaults(**known)
