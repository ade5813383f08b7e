"""The model that everything is tried with: loaded from its package, as its makers meant it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.load import load_model
from outrider.models.resolve import DEFAULT_MODEL, resolve_model
from outrider.models.spec import RopeScaling
from outrider.models.text import text_of_gguf
from outrider.models.weights.gguf_file import read_gguf

TEXT = text_of_gguf(read_gguf(resolve_model(DEFAULT_MODEL).path))


def test_it_loads() -> None:
    calls: list[tuple[int, int]] = []
    model = load_model(DEFAULT_MODEL, dtype=torch.float16, progress=lambda done, total: calls.append((done, total)))
    spec, parameters = model.spec, model.parameters
    assert (spec.family, len(spec.layers), spec.hidden_size, spec.intermediate_size) == ("llama", 30, 576, 1536)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size) == (9, 3, 64, 49_152)
    assert (spec.max_position, spec.norm_eps, spec.tied_head) == (8192, 1e-5, True)
    rope = spec.layers[0].rope
    assert (rope.theta, rope.rotary_dim, rope.scaling) == (100_000.0, 64, RopeScaling.NONE)
    assert parameters.head.weight is parameters.embedding
    assert parameters.layers[0].qkv.weight.shape == (15 * 64, 576)
    tensors = [parameters.embedding, *(layer.qkv.weight for layer in parameters.layers)]
    assert all(tensor.dtype == torch.float16 and torch.isfinite(tensor).all() for tensor in tensors)
    assert (model.name, model.eos_ids) == (DEFAULT_MODEL, (2,))
    assert calls[-1][0] == calls[-1][1] < resolve_model(DEFAULT_MODEL).path.stat().st_size


def test_its_template_speaks_for_it() -> None:
    assert TEXT.chat_template is not None
    assert TEXT.chat_template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    with_system = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert TEXT.chat_template.render(with_system, add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    )


def test_its_tokens() -> None:
    tokenizer = TEXT.tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 49_152)
    # No beginning-of-text is added; special tokens are one token each; digits stand alone.
    assert tokenizer.encode("<|im_start|>Hi<|im_end|>") == [1, tokenizer.token_id("Hi"), 2]
    pieces = [tokenizer.token(token_id) for token_id in tokenizer.encode("in 2024.")]
    assert pieces == ["in", "Ġ", "2", "0", "2", "4", "."]


# A few bytes have no token in this vocabulary: some controls, and what begins characters of unused planes.
# The library drops them.
@given(st.text(st.characters(codec="utf-8", max_codepoint=0x1FFFF, exclude_categories=["Cc"])))
@settings(max_examples=200, deadline=None)
def test_text_survives(text: str) -> None:
    ids = TEXT.tokenizer.encode(text)
    assert TEXT.tokenizer.decode(ids, skip_special_tokens=False) == text
