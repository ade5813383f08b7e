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
from outrider.models.text import GenerationDefaults, text_of_directory, text_of_gguf
from outrider.models.tokenizer import Tokenizer
from outrider.models.weight_forms import DENSE, WeightForms
from outrider.models.weights import GGUFCheckpoint, Progress, load_parameters, open_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedModel:
    name: str
    """The name that is shown to users."""
    spec: DecoderSpec
    parameters: DecoderParameters
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """The chat template; None if the model is not made for conversations."""
    eos_ids: tuple[int, ...]
    """The ids of the tokens that end a text."""
    generation: GenerationDefaults
    dtype: torch.dtype = torch.float32
    """The dtype that the model computes in; matrices may have fewer bits in memory."""
    fingerprint: str
    """Identifies the weights: it is the same wherever the same files are loaded."""
    path: Path | None = None
    """The directory or file of the model; None if it was made in memory."""


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    forms: WeightForms = DENSE,
) -> LoadedModel:
    """Loads a model by built-in name, path or hub id. A model that does not fit is refused before weights are read."""
    resolved = resolve_model(name)
    checkpoint = open_checkpoint(resolved.path)
    spec = checkpoint.spec()
    # Models round the scale of embeddings to the dtype that they compute in.
    spec = replace(spec, embedding_scale=torch.tensor(spec.embedding_scale, dtype=dtype).item())
    if isinstance(checkpoint, GGUFCheckpoint):
        text = text_of_gguf(checkpoint.file)
    else:
        text = text_of_directory(checkpoint.path, checkpoint.config)
    _refuse_foreign_tokenizer(text.tokenizer, spec)
    parameters = load_parameters(checkpoint, spec, dtype=dtype, device=device, progress=progress, forms=forms)
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


def _refuse_foreign_tokenizer(tokenizer: Tokenizer, spec: DecoderSpec) -> None:
    if tokenizer.base_vocab_size > spec.vocab_size:
        raise ModelError(
            f"{tokenizer.source} has token ids up to {tokenizer.base_vocab_size - 1}, but the model embeds only "
            f"{spec.vocab_size} tokens; use the tokenizer that belongs to the model"
        )
