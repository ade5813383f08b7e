"""A real model with sliding windows, Gemma 3 270M, against Transformers with the same weights.

Its weights have terms of their own, so they are fetched on request only: scripts/check-gemma runs these tests.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lossless import assert_greedy_by_reference, assert_same_or_tied, tokens_of

from outrider.api.llm import LLM
from outrider.backends.cpu.packed import PackedMatrix
from outrider.backends.cpu.packing import CPUWeightForms
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.models.load import LoadedModel, load_model
from outrider.models.weights.gguf_file import read_gguf
from outrider.sampling import SamplingParams
from outrider.tools.bench.reference import reference_model

FILE = os.environ.get("OUTRIDER_GEMMA")
pytestmark = pytest.mark.skipif(FILE is None, reason="needs Gemma's weights: scripts/check-gemma")

TOKENS, WINDOW, PROMPTS = 128, 512, 20
ROOT = Path(__file__).parents[2]
TEXTS = [
    "Hello world",
    "  two  spaces   and    more",
    "line\n\n\nbreaks\r\n\t\ttabs \n \n",
    "It's 12345 o'clock; WE'LL see 3.14159 and 1,000,000",
    "naïve café — 漢字 日本語のテキスト Привет, мир! שלום العربية ไทย",
    "👩‍👩‍👧 🙂🙃👍🏽 e\u0301 ﬁ ½ Å \u200b\u00a0x",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<b>bold</b> <unused5> <h1>title</h1> [multimodal] <nothing>",
    "def f(x):\n    return x\n\n\nclass A:\n\tpass\n" + " " * 31 + "# far right",
    "x" + " " * 31 + "y" + " " * 30 + "z" + "\n" * 31 + "\t" * 31,
    "\x00\x01\x7f\ufffd\U0010ffff",
    "a ▁ b▁▁▁c",
    "x" * 100 + " " + "ab " * 30 + "ababab" * 9,
    "",
]
# Longer than any symbol. Hugging Face merges such runs from their middles; SentencePiece and llama.cpp take the
# longest symbol first, and so do we.
LONG_RUNS = [" " * 40 + "x" + " " * 62, "\n" * 40, "\t" * 33 + "y"]


@cache
def model() -> LoadedModel:
    """As an engine loads it: packed."""
    assert FILE is not None
    return load_model(FILE, dtype=torch.float32, forms=CPUWeightForms(packed=True))


@cache
def reference() -> Any:
    """Transformers' own Gemma 3 with the very same weights, written out."""
    return reference_model(model())


def llm_for(speculative: SpeculativeConfig | None = None, **settings: Any) -> LLM:
    config = EngineConfig(
        speculative_config=speculative,
        kv_cache_memory_bytes=1 << 30,
        max_model_len=2048,
        max_num_seqs=PROMPTS,
        sanitizer="raise",
        **settings,
    )
    return LLM.over(build_engine(config, model=model()))


@cache
def prompts() -> list[list[int]]:
    """Prose, law and programs: a little more than one window long to almost three."""
    files = ["LICENSE", "README.md", "docs/architecture.md", "docs/decisions.md", "src/outrider/kv/manager.py"]
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in files]
    found = []
    for number in range(PROMPTS):
        text = texts[number % len(texts)]
        start = 700 * (number // len(texts))
        ids = model().tokenizer.encode(text[start:])[: WINDOW + 50 + 40 * number]
        assert ids[0] == model().tokenizer.bos_id == 2
        assert len(ids) > WINDOW
        found.append(ids)
    return found


@cache
def plain() -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return tokens_of(llm_for().generate(prompts(), params))


def test_layers_are_those_of_the_real_model() -> None:
    spec = model().spec
    assert [layer.window for layer in spec.layers] == ([WINDOW] * 5 + [None]) * 3
    assert (spec.layers[0].rope.theta, spec.layers[5].rope.theta) == (10_000.0, 1_000_000.0)
    assert isinstance(model().parameters.embedding, PackedMatrix)
    assert model().parameters.head.weight is model().parameters.embedding


def test_greedy_text_is_transformers_own() -> None:
    ties = 0
    for number, (prompt, generated) in enumerate(zip(prompts(), plain(), strict=True), 1):
        tied = assert_greedy_by_reference(reference(), prompt, generated)
        ties += tied
        print(f"  text {number:2}: {len(prompt)} tokens read, {len(generated)} written, as Transformers does", end="")
        print(f" but for {tied} proven ties" if tied else "")
    assert [len(generated) for generated in plain()] == [TOKENS] * PROMPTS
    assert ties <= 4


def test_windows_are_felt() -> None:
    """Else the comparison would say nothing about them: without them the model says something else."""
    prompt = prompts()[-1]
    config = reference().config
    kept = config.sliding_window
    try:
        config.sliding_window = len(prompt) + TOKENS
        for layer in reference().model.layers:
            layer.self_attn.sliding_window = config.sliding_window if layer.self_attn.is_sliding else None
        with pytest.raises(AssertionError, match="the reference says"):
            assert_greedy_by_reference(reference(), prompt, plain()[-1])
    finally:
        config.sliding_window = kept
        for layer in reference().model.layers:
            layer.self_attn.sliding_window = kept if layer.self_attn.is_sliding else None


@pytest.mark.parametrize(
    "speculative",
    [
        SpeculativeConfig(method="ngram", num_speculative_tokens=5),
        SpeculativeConfig(method="draft_model", model=FILE, num_hidden_layers=6, num_speculative_tokens=2),
    ],
    ids=["ngram", "six layers"],
)
def test_drafts_do_not_change_it(speculative: SpeculativeConfig) -> None:
    llm = llm_for(speculative)
    some = slice(0, PROMPTS if speculative.method == "ngram" else 4)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    found = tokens_of(llm.generate(prompts()[some], params))
    assert assert_same_or_tied(llm.engine, prompts()[some], plain()[some], found) == 0
    counts = llm.engine.speculation
    assert counts.draft_tokens > 0
    print(f"  {speculative.method}: the same texts, {counts.mean_acceptance_length:.2f} tokens a step")


# --- tokens -----------------------------------------------------------------------------------------


def cut_by_hand(text: str) -> list[int]:
    """As SentencePiece describes itself: defined symbols first, the longest; then neighbours that give the best piece,
    the leftmost of equals; what no piece covers is spelt in bytes."""
    tokens, scores = (metadata_of_file()[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    number_of, symbols, lengths = vocabulary_of_file()
    ids: list[int] = []
    at, begin = 0, 0
    text = text.replace("▁", " ")
    while at <= len(text):
        length = next((n for n in lengths if text[at : at + n] in symbols), 0) if at < len(text) else 0
        if not length and at < len(text):
            at += 1
            continue
        pieces = list(text[begin:at].replace(" ", "▁"))
        while True:
            pairs = [(-scores[number_of[a + b]], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in number_of]
            if not pairs:
                break
            i = min(pairs)[1]
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        for piece in pieces:
            spelt = [tokens.index(f"<0x{byte:02X}>") for byte in piece.encode()] if piece not in number_of else None
            ids += [number_of[piece]] if spelt is None else spelt
        if at == len(text):
            break
        ids.append(symbols[text[at : at + length]])
        at += length
        begin = at
    return ids


@cache
def metadata_of_file() -> dict[str, Any]:
    assert FILE is not None
    return read_gguf(Path(FILE)).metadata


@cache
def vocabulary_of_file() -> tuple[dict[str, int], dict[str, int], list[int]]:
    """Pieces; symbols that are found as they are; the lengths of symbols, the longest first."""
    metadata = metadata_of_file()
    kinds = list(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    pieces = {token: number for number, (token, kind) in enumerate(kinds) if kind == 1}
    symbols = {token: number for number, (token, kind) in enumerate(kinds) if kind in (3, 4)}
    return pieces, symbols, sorted({len(token) for token in symbols}, reverse=True)


@pytest.mark.parametrize("text", TEXTS + LONG_RUNS, ids=range(len(TEXTS + LONG_RUNS)))
def test_texts_are_cut_as_sentence_piece_cuts_them(text: str) -> None:
    ids = model().tokenizer.encode(text, add_special_tokens=False)
    assert ids == cut_by_hand(text)
    assert model().tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")


def test_texts_are_cut_as_transformers_cuts_them() -> None:
    import transformers

    assert FILE is not None
    path = Path(FILE).resolve()
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("src/outrider/models/**/*.py")])
    texts = TEXTS + [file.read_text(encoding="utf-8") for file in files]
    texts = [text for text in texts if " " * 32 not in text]
    assert len(texts) > 40
    for text in texts:
        found = model().tokenizer.encode(text, add_special_tokens=False)
        assert found == theirs(text, add_special_tokens=False)["input_ids"]
    print(f"  {len(texts)} texts are cut as Transformers cuts them")
