"""A model, ready to run: its description, tensors, tokenizer and chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outrider.errors import ModelError
from outrider.models.chat import ChatTemplate
from outrider.models.parameters import DecoderParameters
from outrider.models.resolve import resolve_model, weights_fingerprint
from outrider.models.spec import DecoderSpec
from outrider.models.text import GenerationDefaults, ModelText, text_of_directory, text_of_gguf
from outrider.models.tokenizer import Tokenizer
from outrider.models.weights import Checkpoint, GGUFCheckpoint, Progress, load_parameters, open_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedModel:
    name: str
    """For people."""
    spec: DecoderSpec
    parameters: DecoderParameters
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None where the model is not made for conversations."""
    eos_ids: tuple[int, ...]
    """Any of them ends a text."""
    generation: GenerationDefaults
    dtype: torch.dtype = torch.float32
    """What it computes in; matrices may lie in memory in fewer bits."""
    fingerprint: str
    """Names the weights: the same wherever the same files are loaded."""
    path: Path | None = None
    """The directory or file it came from; None for one that was made in memory."""


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    as_stored: bool = False,
) -> LoadedModel:
    """By built-in name, path or hub id. What can be refused is refused before weights are read.

    `as_stored`: matrices that the file stores in fewer bits stay so in memory; whoever computes widens them."""
    resolved = resolve_model(name)
    checkpoint = open_checkpoint(resolved.path)
    spec = _rounded(checkpoint.spec(), dtype)
    text = _text_of(checkpoint)
    _refuse_foreign_tokenizer(text.tokenizer, spec)
    parameters = load_parameters(checkpoint, spec, dtype=dtype, device=device, progress=progress, as_stored=as_stored)
    return LoadedModel(
        name=resolved.name,
        spec=spec,
        parameters=parameters,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        # An id that the model does not embed is never sampled, so it ends nothing.
        eos_ids=tuple(token_id for token_id in text.tokenizer.eos_ids if token_id < spec.vocab_size),
        generation=text.generation,
        dtype=dtype,
        fingerprint=weights_fingerprint(resolved),
        path=resolved.path,
    )


def _rounded(spec: DecoderSpec, dtype: torch.dtype) -> DecoderSpec:
    """Models multiply embeddings by a scale rounded to what they compute in."""
    return replace(spec, embedding_scale=torch.tensor(spec.embedding_scale, dtype=dtype).item())


def _text_of(checkpoint: Checkpoint) -> ModelText:
    if isinstance(checkpoint, GGUFCheckpoint):
        return text_of_gguf(checkpoint.file)
    return text_of_directory(checkpoint.path, checkpoint.config)


def _refuse_foreign_tokenizer(tokenizer: Tokenizer, spec: DecoderSpec) -> None:
    if tokenizer.base_vocab_size > spec.vocab_size:
        raise ModelError(
            f"{tokenizer.source} has token ids up to {tokenizer.base_vocab_size - 1}, but the model embeds only "
            f"{spec.vocab_size} tokens: they do not belong together"
        )
