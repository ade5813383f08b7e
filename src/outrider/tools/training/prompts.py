"""Prompts from JSON lines, as token ids of a conversation's beginning."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, ModelError
from outrider.models.chat import ChatTemplate
from outrider.models.resolve import resolve_model
from outrider.models.text import text_of_directory, text_of_gguf
from outrider.models.tokenizer import Tokenizer
from outrider.models.weights import GGUFCheckpoint, open_checkpoint
from outrider.tools.json_lines import json_objects

Message = dict[str, str]
EXPECTED = 'expected lines of JSON with "prompt" or "turns"'


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLine:
    turns: tuple[str, ...]
    category: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatText:
    """Tokenizer and chat template of a target: conversations to token ids."""

    tokenizer: Tokenizer
    template: ChatTemplate
    eos_ids: tuple[int, ...]

    def encode(self, messages: list[Message]) -> list[int]:
        text = self.template.render(messages, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)


def load_chat_text(name: str) -> ChatText:
    checkpoint = open_checkpoint(resolve_model(name).path)
    if isinstance(checkpoint, GGUFCheckpoint):
        text = text_of_gguf(checkpoint.file)
    else:
        text = text_of_directory(checkpoint.path, checkpoint.config)
    if text.chat_template is None:
        raise ModelError(f"{name} has no chat template, so it cannot write conversations; choose a chat model")
    return ChatText(tokenizer=text.tokenizer, template=text.chat_template, eos_ids=tuple(text.tokenizer.eos_ids))


def read_prompts(path: Path) -> list[PromptLine]:
    """Reads JSON lines with "turns" or "prompt", and optionally "category" or "source"; names in .gz are unpacked."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; {EXPECTED}") from None
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as problem:
        raise ConfigError(f"{path} cannot be read: {problem}") from None
    return [_prompt(f"{path}, line {number}", fields) for number, fields in json_objects(path, text, EXPECTED)]


def _prompt(where: str, fields: dict[str, Any]) -> PromptLine:
    turns = fields.get("turns", [fields["prompt"]] if "prompt" in fields else None)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f'{where} has neither "prompt" nor "turns" with texts; {EXPECTED}')
    source = str(fields.get("source", "")).split(" (")[0]
    return PromptLine(turns=tuple(turns), category=source or str(fields.get("category", "all")))
