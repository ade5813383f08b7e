"""Streams of token ids, with a bit per token that says whether the assistant sampled it.

A corpus is a directory of `toks_N.npy` (uint16 or uint32, [streams, length]) with their bits either in one
`roles.npy` for all of them in order, or in a `roles_N.npy` next to each (np.packbits along axis 1). A `corpus.json`
next to them may say where they come from.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.errors import ConfigError

Tokens = npt.NDArray[np.integer]
Roles = npt.NDArray[np.bool_]

NOTE_FILE = "corpus.json"
TOKENS_NAME = re.compile(r"toks_(\d+)\.npy")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Streams:
    tokens: Tokens
    """Token ids: [streams, length]."""
    roles: Roles
    """[streams, length]: whether the assistant sampled the token."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, where: slice | npt.NDArray[np.integer]) -> Streams:
        return Streams(tokens=self.tokens[where], roles=self.roles[where])


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusNote:
    """Where a corpus comes from, for the model card; None for what is not recorded."""

    source: str | None = None
    licence: str | None = None
    written_by: str | None = None
    """The model that wrote the answers."""


def read_note(corpus: Path) -> CorpusNote:
    path = (corpus if corpus.is_dir() else corpus.parent) / NOTE_FILE
    if not path.is_file():
        return CorpusNote()
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} is not readable JSON: {problem}") from None
    names = CorpusNote.__dataclass_fields__
    if not isinstance(fields, dict) or not all(
        name in names and (value is None or isinstance(value, str)) for name, value in fields.items()
    ):
        raise ConfigError(f"{path} must be a JSON object with texts for any of {', '.join(names)}")
    return CorpusNote(**fields)


def write_note(directory: Path, note: CorpusNote) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: value for name, value in asdict(note).items() if value is not None}, indent=2)
    (directory / NOTE_FILE).write_text(f"{text}\n", encoding="utf-8")


def shared_prompts(streams: Streams, among: Streams) -> int:
    """Counts the streams whose prompt, the tokens before the first answer, begins a stream of `among`."""

    def prompts(some: Streams) -> list[bytes]:
        ends = some.roles.argmax(axis=1)
        return [row[:end].astype(np.int64).tobytes() for row, end in zip(some.tokens, ends, strict=True)]

    known = set(prompts(among))
    return sum(prompt in known for prompt in prompts(streams))


def read_corpus(path: Path, *, vocab_size: int) -> Streams:
    """Reads every stream of a directory, or of one token file with its roles next to it."""
    if path.is_dir():
        files = sorted(
            (file for file in path.iterdir() if TOKENS_NAME.fullmatch(file.name)),
            key=lambda file: int(TOKENS_NAME.fullmatch(file.name)[1]),  # type: ignore[index]
        )
    else:
        files = [path] if path.is_file() else []
    if not files:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; make a corpus first: outrider train corpus --output {path}")
        raise ConfigError(f"{path} has no toks_N.npy, so it is not a corpus; make one: outrider train corpus")
    tokens = [_read_array(file) for file in files]
    for file, part in zip(files, tokens, strict=True):
        _check_tokens(file, part, tokens[0].shape[1] if tokens[0].ndim == 2 else 0, vocab_size)
    roles = _read_roles(files, [len(part) for part in tokens], tokens[0].shape[1])
    if not roles.any():
        raise ConfigError(f"{path}: no token was sampled by the assistant, so there is nothing to learn from")
    return Streams(tokens=np.concatenate(tokens), roles=roles)


def count_files(path: Path) -> int:
    return sum(1 for file in path.iterdir() if TOKENS_NAME.fullmatch(file.name)) if path.is_dir() else 1


def write_shard(directory: Path, streams: Streams) -> Path:
    """Adds streams to a corpus; a reader sees the whole shard or nothing of it."""
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / "roles.npy").exists():
        raise ConfigError(f"{directory} keeps all roles in one file: write new streams into a directory of their own")
    number = count_files(directory)
    dtype = np.uint16 if streams.tokens.size == 0 or int(streams.tokens.max()) < 1 << 16 else np.uint32
    path = directory / f"toks_{number}.npy"
    # Roles first: a concurrent reader would refuse tokens without roles.
    _write_array(directory / f"roles_{number}.npy", np.packbits(streams.roles, axis=1))
    _write_array(path, streams.tokens.astype(dtype))
    return path


def _write_array(path: Path, array: npt.NDArray[np.generic]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.save(file, array)
    partial.replace(path)


def _read_array(path: Path) -> npt.NDArray[np.integer]:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as problem:
        raise ConfigError(f"{path} is not a readable npy file: {problem}") from None
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{path} does not hold whole numbers")
    return array


def _check_tokens(path: Path, tokens: Tokens, length: int, vocab_size: int) -> None:
    if tokens.ndim != 2 or tokens.shape[1] != length or not tokens.size:
        raise ConfigError(f"{path} has shape {tokens.shape}; expected streams of one length: [streams, length]")
    if int(tokens.max()) >= vocab_size or int(tokens.min()) < 0:
        raise ConfigError(
            f"{path} has token ids up to {int(tokens.max())}, but the target has {vocab_size} tokens: "
            "the corpus was made with another model; make one with this model"
        )


def _read_roles(files: list[Path], counts: list[int], length: int) -> Roles:
    directory = files[0].parent
    per_file = [file.with_name(file.name.replace("toks", "roles", 1)) for file in files]
    if all(file.is_file() and file != tokens for file, tokens in zip(per_file, files, strict=True)):
        packed = np.concatenate([_read_array(file) for file in per_file])
    elif (directory / "roles.npy").is_file():
        packed = _read_array(directory / "roles.npy")
    else:
        raise ConfigError(f"{directory}: roles are missing; {per_file[0].name} or roles.npy must be next to the tokens")
    if packed.shape != (sum(counts), (length + 7) // 8):
        raise ConfigError(
            f"{directory}: roles have shape {packed.shape}, but {sum(counts)} streams of {length} tokens need "
            f"({sum(counts)}, {(length + 7) // 8})"
        )
    return np.unpackbits(packed.astype(np.uint8), axis=1, count=length).astype(np.bool_)
