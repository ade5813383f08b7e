"""Tokenizers from tokenizer.json and from GGUF metadata, against Hugging Face's own."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.fakes import edit_json, save, tiny_model, tiny_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from outrider.errors import ModelError, RequestError
from outrider.models.text import text_of_directory
from outrider.models.tokenizer import Decoding, Tokenizer, tokenizer_from_file
from outrider.models.tokenizer_gguf import PRE_TOKENIZERS, tokenizer_from_gguf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Hello world",
    "It's 12345 o'clock; WE'LL see 3.14159",
    "  leading,   inner and trailing  ",
    "line\n\nbreaks\r\n\ttabs",
    "naïve café — 漢字 👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level vocabulary that knows some words and numbers."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["hello world it's o'clock we'll see leading inner 12345 12345 314159 314 159 user naïve café 漢字"] * 20
    backend.train_from_iterator(words, trainer)
    model = json.loads(backend.to_str())["model"]
    return list(model["vocab"]), [" ".join(merge) for merge in model["merges"]]


TOKENS, MERGES = trained()


def metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return fields | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def from_gguf(pre: str = "gpt-2", **changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(metadata(pre, **changes), "tiny.gguf")


# --- GGUF, byte level -------------------------------------------------------------------------------


def hugging_face(kind: str) -> Any:
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    reference = getattr(transformers, kind)(vocab=vocabulary, merges=merges)
    reference.add_special_tokens({"additional_special_tokens": [AddedToken(s, special=True) for s in SPECIAL]})
    return reference


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("pre", "kind"), [("gpt-2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")])
def test_texts_are_cut_as_hugging_face_cuts_them(pre: str, kind: str, text: str) -> None:
    reference = hugging_face(kind)
    found = from_gguf(pre)
    expected = reference(text, add_special_tokens=False)["input_ids"]
    assert found.encode(text) == expected
    assert found.decode(expected) == reference.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm_cuts_digits_one_by_one(text: str) -> None:
    # SmolLM2's own tokenizer.json, but for the vocabulary.
    reference = tokenizers.Tokenizer(
        models.BPE(vocab={t: n for n, t in enumerate(TOKENS)}, merges=[tuple(m.split(" ")) for m in MERGES])
    )
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    reference.add_special_tokens(SPECIAL)
    assert from_gguf("smollm").encode(text) == reference.encode(text).ids


def test_llama_3_cuts_digits_by_three_and_takes_whole_words_first() -> None:
    pieces = [piece for piece, _ in PRE_TOKENIZERS["llama-bpe"].build().pre_tokenize_str("It'S 12345 x\n\n y")]
    assert pieces == ["It", "'S", "Ġ", "123", "45", "Ġx", "ĊĊ", "Ġy"]
    # A token that no chain of merges leads to is found all the same.
    tokens = [*TOKENS, "qzqz"]
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    found = from_gguf("llama-bpe", tokens=tokens, token_type=types, add_bos_token=False)
    assert found.encode("qzqz") == [len(TOKENS)]
    assert len(from_gguf("qwen2", tokens=tokens, token_type=types).encode("qzqz")) == 4


def test_a_beginning_of_text_is_added_where_the_file_or_its_kind_says_so() -> None:
    assert from_gguf("gpt-2").encode("a")[0] != 1
    assert from_gguf("gpt-2", add_bos_token=True).encode("a")[0] == 1
    assert from_gguf("llama-bpe").encode("a")[0] == 1
    assert from_gguf("llama-bpe", add_bos_token=False).encode("a")[0] != 1
    assert from_gguf("gpt-2", add_bos_token=True).encode("a", add_special_tokens=False)[0] != 1
    assert from_gguf("gpt-2", add_bos_token=True).bos_id == 1


def test_every_end_of_text_counts() -> None:
    assert from_gguf().eos_ids == (2,)
    assert from_gguf(eot_token_id=0, eom_token_id=2).eos_ids == (2, 0)


def test_user_defined_tokens_are_found_in_text_but_are_ordinary_text() -> None:
    tokens = [*TOKENS, "<tool>"]
    types = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)) + [4]
    found = from_gguf(tokens=tokens, token_type=types)
    ids = found.encode("a<tool><|im_end|>")
    assert ids[1:] == [len(TOKENS), 2]
    assert found.decode(ids) == "a<tool>"
    assert found.decode(ids, skip_special_tokens=False) == "a<tool><|im_end|>"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "t5"}, ("'t5'", "gpt2", "llama")),
        ({"pre": "tekken"}, ("'tekken'", "smollm", "qwen2")),
        ({"tokens": None}, ("tokenizer.ggml.tokens",)),
        ({"token_type": [1]}, ("1 token types",)),
        ({"eos_token_id": 10_000}, ("eos_token_id 10000", "outside")),
        ({"merges": ["no such"]}, ("do not fit together",)),
        ({"merges": ["nospace"]}, ("do not fit together",)),
        ({"model": "llama"}, ("tokenizer.ggml.scores",)),
    ],
)
def test_metadata_that_makes_no_tokenizer_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        from_gguf(**changes)
    assert all(word in str(caught.value) for word in (*words, "tiny.gguf"))


# --- GGUF, SentencePiece ----------------------------------------------------------------------------

LETTERS = "▁abcde"


def sentence_pieces() -> tuple[list[str], list[float], list[int]]:
    """Control tokens, all bytes, letters, and words better than longer ones."""
    shuffled = random.Random(3)
    words = {"".join(shuffled.choices(LETTERS, k=shuffled.randint(2, 4))) for _ in range(60)} | {"▁a", "▁b", "ab"}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *sorted(words)]
    plain = len(LETTERS) + len(words)
    scores = [0.0] * 259 + [-float(rank) for rank in range(plain)]
    types = [2, 3, 3] + [6] * 256 + [1] * plain
    return tokens, scores, types


def piece_tokenizer(**changes: Any) -> Tokenizer:
    tokens, scores, types = sentence_pieces()
    fields = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types} | changes
    return tokenizer_from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()}, "tiny.gguf")


def merged_by_hand(text: str) -> list[str]:
    """SentencePiece as described: merge the neighbours that give the best piece, the leftmost of equals."""
    tokens, scores, _ = sentence_pieces()
    score_of = dict(zip(tokens[259:], scores[259:], strict=True))
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(-score_of[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in score_of]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@given(st.text(alphabet="abcde ", max_size=30))
@settings(max_examples=200, deadline=None)
def test_pieces_are_merged_best_first(text: str) -> None:
    found = piece_tokenizer()
    ids = found.encode(text, add_special_tokens=False)
    assert [found.token(number) for number in ids] == merged_by_hand(text)
    assert found.decode(ids) == text


def test_what_no_piece_covers_is_spelt_in_bytes() -> None:
    found = piece_tokenizer(bos_token_id=1, eos_token_id=2)
    ids = found.encode("aé")
    assert [found.token(number) for number in ids] == ["<s>", "▁a", "<0xC3>", "<0xA9>"]
    assert found.decode(ids) == "aé"
    assert found.decoding is Decoding.PIECES_STRIPPED
    assert piece_tokenizer(add_space_prefix=False).decoding is Decoding.PIECES
    assert piece_tokenizer(add_space_prefix=False).decode(ids[1:2]) == " a"


def gemma_tokenizer() -> Tokenizer:
    """As Gemma's files have it: no space in front, runs of spaces and lines as symbols, <unk> among control tokens."""
    tokens, scores, types = sentence_pieces()
    symbols = ["  ", "   ", "\n", "\n\n", "<b>"]
    return piece_tokenizer(
        tokens=[*tokens, *symbols],
        scores=[*scores, *[-1000.0] * len(symbols)],
        token_type=[3, *types[1:], *[4] * len(symbols)],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_space_prefix=False,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ["a"]),
        (" a", ["▁a"]),
        ("a  b", ["a", "▁▁", "b"]),
        ("a    b", ["a", "▁▁▁", "▁b"]),
        ("a\n\n\na", ["a", "\n\n", "\n", "a"]),
        ("<b> a", ["<b>", "▁a"]),
        ("\t", ["<0x09>"]),
        ("<s>a</s>", ["<s>", "a", "</s>"]),
        ("", []),
    ],
)
def test_symbols_are_found_before_pieces_are_merged(text: str, expected: list[str]) -> None:
    found = gemma_tokenizer()
    ids = found.encode(text, add_special_tokens=False)
    assert [found.token(number) for number in ids] == expected
    assert found.encode(text) == [1, *ids]
    assert found.decode(ids, skip_special_tokens=False) == text


def test_a_written_out_mark_of_a_space_is_a_space() -> None:
    assert gemma_tokenizer().encode("a ▁▁b") == gemma_tokenizer().encode("a   b")
    assert len(gemma_tokenizer().encode("a ▁▁b")) == 4


# --- tokenizer.json ---------------------------------------------------------------------------------


def test_a_directory_gives_the_tokenizer_of_its_file(tmp_path: Path) -> None:
    backend = tiny_tokenizer()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 60)])
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    found = tokenizer_from_file(tmp_path / "tokenizer.json", bos_token="<s>", eos_token="</s>", eos_ids=[5, 61])
    assert (found.bos_id, found.eos_ids, found.vocab_size) == (60, (5, 61), 62)
    ids = found.encode("!!!!</s>")
    assert ids == [60, *[found.token_id("!")] * 4, 61]
    assert found.encode("!", add_special_tokens=False) == ids[1:2]
    assert found.decode(ids) == "!!!!"
    assert found.token(10_000) is None
    assert found.decode([10_000]) == ""


def write_text_files(directory: Path, generation: Any, config: Any, tokenizer: Any) -> Path:
    save(tiny_model("llama"), directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    edit_json(directory / "config.json", **config)
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {}, (7, 8)),
        ({"eos_token_id": 7}, {"eos_token_id": 9}, {}, (7,)),
        (None, {"eos_token_id": 9}, {}, (9,)),
        (None, {"eos_token_id": [9, 3]}, {}, (9, 3)),
        (None, {"eos_token_id": None}, {"eos_token": "!"}, (0,)),
        ({"eos_token_id": [7]}, {}, {"eos_token": {"content": "!"}}, (7, 0)),
    ],
)
def test_ends_of_text_come_from_every_file_that_knows_them(
    generation: Any, config: Any, tokenizer: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    directory = write_text_files(tmp_path, generation, config, tokenizer)
    text = text_of_directory(directory, json.loads((directory / "config.json").read_text()))
    assert text.tokenizer.eos_ids == expected


def test_sampling_defaults_are_read(tmp_path: Path) -> None:
    generation = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "do_sample": True, "repetition_penalty": 1.05}
    text = text_of_directory(write_text_files(tmp_path, generation, {}, {}), {})
    found = text.generation
    assert (found.temperature, found.top_p, found.top_k, found.min_p, found.repetition_penalty) == (
        0.7,
        0.8,
        20,
        None,
        1.05,
    )


@pytest.mark.parametrize(
    ("generation", "words"),
    [({"eos_token_id": "</s>"}, ("eos_token_id", "</s>")), ({"temperature": "hot"}, ("temperature", "hot"))],
)
def test_broken_settings_are_named(generation: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    directory = write_text_files(tmp_path, generation, {}, {})
    with pytest.raises(ModelError) as caught:
        text_of_directory(directory, {})
    assert all(word in str(caught.value) for word in words)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        tokenizer_from_file(path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match="AutoTokenizer"):
        tokenizer_from_file(path)
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a readable tokenizer"):
        tokenizer_from_file(path)


def test_ways_of_decoding_that_cannot_be_streamed_are_refused(tmp_path: Path) -> None:
    backend = tiny_tokenizer()
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"WordPiece.*ByteLevel"):
        tokenizer_from_file(tmp_path / "tokenizer.json")


def test_a_prompt_that_is_no_text_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="not valid Unicode text"):
        from_gguf().encode("\ud800")


# --- comparing --------------------------------------------------------------------------------------


def test_the_same_tokenizer_from_two_files_has_one_fingerprint(tmp_path: Path) -> None:
    # The order of special tokens and the format of merges differ; the meaning of ids does not.
    reference = hugging_face("GPT2Tokenizer")
    reference.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = from_gguf(), tokenizer_from_file(tmp_path / "tokenizer.json")
    assert ours.fingerprint == theirs.fingerprint
    assert ours.difference(theirs) is None


def test_padding_of_the_vocabulary_is_no_difference() -> None:
    padded = [*TOKENS, "[PAD1]", "[PAD2]"]
    types = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)) + [5, 5]
    found = from_gguf(tokens=padded, token_type=types)
    assert found.fingerprint == from_gguf().fingerprint
    assert found.vocab_size == len(TOKENS)


def test_tokenizers_differ_where_an_id_that_both_have_means_something_else() -> None:
    ours = from_gguf()
    more = from_gguf(tokens=[*TOKENS, "<think>"], token_type=[*metadata()["tokenizer.ggml.token_type"], 4])
    assert more.difference(ours) is None
    swapped = [*TOKENS]
    swapped[10], swapped[11] = swapped[11], swapped[10]
    difference = from_gguf(tokens=swapped).difference(ours)
    assert difference is not None
    assert all(word in difference for word in ("token 10", repr(TOKENS[10]), repr(TOKENS[11])))
    assert ours.fingerprint not in (more.fingerprint, from_gguf(merges=MERGES[:-1]).fingerprint)
