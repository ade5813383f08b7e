"""Text to token ids and back, over the tokenizers library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from outrider.errors import ModelError, RequestError


class Decoding(Enum):
    """How tokens become text, which streaming must follow token by token."""

    BYTE_LEVEL = "byte_level"
    """Each token is bytes, spelt with one printable character per byte; concatenated they are UTF-8."""
    PIECES = "pieces"
    """Each token is text with ▁ for spaces, or one raw byte <0xNN>."""
    PIECES_STRIPPED = "pieces_stripped"
    """PIECES without one space at the very beginning of the text."""


class Tokenizer:
    """A tokenizer. Special tokens written out in a text are recognised as such, as Hugging Face does by default."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, source: str, bos_id: int | None = None, eos_ids: Iterable[int] = ()
    ) -> None:
        # Files may contain truncation and padding settings from earlier use.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._tokens: dict[int, str] = {}
        """Tokens that have been looked up, by id."""
        self.source = source
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.decoding = _decoding_of(backend, source)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids, with the beginning-of-text token if the model expects it and `add_special_tokens` is set.

        Text rendered by a chat template already contains its special tokens: add none to it.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeError, TypeError):
            # The library refuses text without a UTF-8 form, such as half of a surrogate pair from JSON.
            raise RequestError("the prompt is not valid Unicode text; remove unpaired surrogates from it") from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """Returns a token as the vocabulary spells it; None for an unused id."""
        # After a step, whose weights have filled the CPU caches, a dictionary is faster than the library's tables.
        token = self._tokens.get(token_id)
        if token is None:
            token = self._backend.id_to_token(token_id)
            if token is not None:
                self._tokens[token_id] = token
        return token

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def to_json(self) -> str:
        """Returns text from which `tokenizer_from_json` makes an equal tokenizer, for instance in another process."""
        return str(self._backend.to_str())

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @cached_property
    def vocab_size(self) -> int:
        """Largest id plus one; the model's own vocabulary may be padded beyond it."""
        return max(self.vocabulary.values(), default=-1) + 1

    @cached_property
    def base_vocab_size(self) -> int:
        """Vocabulary size without added tokens, which some models have but do not embed."""
        return max(self._backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of tokens, ids and merges: equal for equal tokenizers from different files."""
        merges = json.loads(self._backend.to_str())["model"].get("merges", [])
        pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
        vocabulary = sorted(self.vocabulary.items(), key=lambda item: (item[1], item[0]))
        text = json.dumps([vocabulary, pairs], ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def difference(self, other: Tokenizer) -> str | None:
        """Returns why the token ids of the two tokenizers differ in meaning, or None if they agree.

        Only ids that both have are compared: vocabularies may be padded to different sizes.
        """
        if self.fingerprint == other.fingerprint:
            return None
        mine = {number: token for token, number in self.vocabulary.items()}
        theirs = {number: token for token, number in other.vocabulary.items()}
        for number in sorted(mine.keys() & theirs.keys()):
            if mine[number] != theirs[number]:
                return f"token {number} is {mine[number]!r} in one and {theirs[number]!r} in the other"
        return None


def _decoding_of(backend: tokenizers.Tokenizer, source: str) -> Decoding:
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    chain: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in chain]
    if kinds == ["ByteLevel"]:
        return Decoding.BYTE_LEVEL
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_spaces(chain[0]):
        if kinds[3:] == []:
            return Decoding.PIECES
        if kinds[3:] == ["Strip"] and chain[3] == {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return Decoding.PIECES_STRIPPED
    raise ModelError(
        f"{source}: a tokenizer that decodes by {' + '.join(kinds)} is not supported; "
        "supported: ByteLevel, and Replace + ByteFallback + Fuse (+ Strip)"
    )


def _replaces_spaces(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": "▁"} and step.get("content") == " "


def tokenizer_from_json(text: str, *, source: str, bos_id: int | None, eos_ids: Iterable[int]) -> Tokenizer:
    """Makes a tokenizer from the text that `Tokenizer.to_json` returned."""
    return Tokenizer(tokenizers.Tokenizer.from_str(text), source=source, bos_id=bos_id, eos_ids=eos_ids)


def tokenizer_from_file(
    path: Path, *, bos_token: str | None = None, eos_token: str | None = None, eos_ids: Iterable[int] = ()
) -> Tokenizer:
    """Reads a tokenizer.json. Texts end at any of `eos_ids` and at `eos_token`."""
    if not path.is_file():
        hint = ""
        if (path.parent / "tokenizer.model").is_file():
            hint = "; save the model's AutoTokenizer with transformers to get it from tokenizer.model"
        raise ModelError(f"{path} is missing; a model directory needs it next to the weights{hint}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises plain Exception
        raise ModelError(f"{path} is not a readable tokenizer: {problem}") from None
    bos_id = backend.token_to_id(bos_token) if bos_token is not None else None
    eos_id = backend.token_to_id(eos_token) if eos_token is not None else None
    ends = [*eos_ids, *([] if eos_id is None else [eos_id])]
    return Tokenizer(backend, source=str(path), bos_id=bos_id, eos_ids=ends)
