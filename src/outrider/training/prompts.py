"""Prompts from JSON lines, as token ids of a conversation's beginning."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError, ModelError
from outrider.models.chat import ChatTemplate
from outrider.models.resolve import resolve_model
from outrider.models.text import text_of_directory, text_of_gguf
from outrider.models.tokenizer import Tokenizer
from outrider.models.weights import GGUFCheckpoint, open_checkpoint

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLine:
    turns: tuple[str, ...]
    category: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatText:
    """Between conversations and token ids."""

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
        raise ModelError(f"{name} has no chat template, so it cannot write conversations")
    return ChatText(tokenizer=text.tokenizer, template=text.chat_template, eos_ids=tuple(text.tokenizer.eos_ids))


def read_prompts(path: Path) -> list[PromptLine]:
    """Lines with "turns" or "prompt", and perhaps "category" or "source"; gzip by name."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f'{path} does not exist; prompts are lines of JSON with "prompt" or "turns"') from None
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as problem:
        raise ConfigError(f"{path} cannot be read: {problem}") from None
    # Not splitlines(): texts may hold other line ends than "\n" unescaped.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path} has no prompts")
    return [_line(path, number, line) for number, line in lines]


def _line(path: Path, number: int, line: str) -> PromptLine:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path}, line {number} is no JSON: {problem}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}, line {number} is no JSON object")
    turns = fields.get("turns", [fields["prompt"]] if "prompt" in fields else None)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f'{path}, line {number} has neither "prompt" nor "turns" with texts')
    source = str(fields.get("source", "")).split(" (")[0]
    return PromptLine(turns=tuple(turns), category=source or str(fields.get("category", "all")))
