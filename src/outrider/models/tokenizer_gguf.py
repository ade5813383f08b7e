"""A tokenizer from the metadata of a GGUF file, which stores vocabulary and merges and only names the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from outrider.errors import ModelError
from outrider.models.tokenizer import Tokenizer

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizer:
    """The meaning of a `tokenizer.ggml.pre`: how text is split into words before merging."""

    words: str | None = None
    """Pattern of a word; None for GPT-2's, which the library has built in."""
    single_digits: bool = False
    compose: bool = False
    """Whether text is normalised to NFC first."""
    whole_words_first: bool = False
    """Whether a word that is itself a token is used without merging."""
    adds_bos: bool = False
    """Whether a beginning-of-text token is added if the file does not say."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.words is not None:
            steps.append(pre_tokenizers.Split(Regex(self.words), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.words is None))
        return pre_tokenizers.Sequence(steps)


GPT2 = PreTokenizer()
LLAMA3 = PreTokenizer(words=LLAMA3_WORDS, whole_words_first=True, adds_bos=True)
QWEN2 = PreTokenizer(words=QWEN2_WORDS, compose=True)
PRE_TOKENIZERS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": PreTokenizer(single_digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
}


class Built(NamedTuple):
    backend: tokenizers.Tokenizer
    adds_bos: bool
    """Whether a beginning-of-text token is added if the file does not say."""
    rewritten: bool
    """Whether user-defined tokens are matched after spaces were rewritten: three spaces are then one token, written as
    spaces or as ▁."""


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Makes the tokenizer; raises ModelError if the metadata is incomplete or of an unsupported kind."""
    model = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_pieces}
    if model not in builders:
        raise ModelError(f"{source}: tokenizer {model!r} is not supported; supported: {', '.join(builders)}")
    tokens = _tokens(metadata, source)
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{source}: {len(tokens)} tokens, but {len(types)} token types")
    backend, adds_bos, rewritten = builders[model](metadata, tokens, types, source)
    backend.add_special_tokens(_added(tokens, types, TokenType.CONTROL, special=True, rewritten=False))
    backend.add_tokens(_added(tokens, types, TokenType.USER_DEFINED, special=False, rewritten=rewritten))
    bos_id = _special(metadata, tokens, "bos", source)
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos_id is not None:
        bos = tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, bos_id)]
        )
    ends = (_special(metadata, tokens, name, source) for name in ("eos", "eot", "eom"))
    return Tokenizer(backend, source=source, bos_id=bos_id, eos_ids=[end for end in ends if end is not None])


def _tokens(metadata: Mapping[str, Any], source: str) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{source} has no tokenizer.ggml.tokens, so it cannot read text")
    return tokens


def _special(metadata: Mapping[str, Any], tokens: list[str], name: str, source: str) -> int | None:
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.{name}_token_id {number!r} is outside the vocabulary")
    return number


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    # Unused entries only pad the embedding to a round size.
    return {token: number for number, token in enumerate(tokens) if types[number] != TokenType.UNUSED}


def _added(
    tokens: list[str], types: list[int], wanted: TokenType, *, special: bool, rewritten: bool
) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=rewritten)
        for token, kind in zip(tokens, types, strict=True)
        if kind == wanted
    ]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str) -> Built:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{source}: pre-tokenizer {name!r} is not supported, and another one would split words differently; "
            f"supported: {', '.join(PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    vocabulary = _vocabulary(tokens, types)
    backend = _with_model(vocabulary, merges, source, ignore_merges=pre.whole_words_first)
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    if pre.compose:
        backend.normalizer = normalizers.NFC()
    return Built(backend, pre.adds_bos, False)


def _sentence_pieces(metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str) -> Built:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{source} has no tokenizer.ggml.scores for each token, which this kind of tokenizer needs")
    vocabulary = _vocabulary(tokens, types)
    plain = {token: number for number, token in enumerate(tokens) if types[number] == TokenType.NORMAL}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    merges = _merges_by_score(plain, scores)
    backend = _with_model(vocabulary, merges, source, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    replace: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    decode: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if prefixed:
        replace.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(replace)
    backend.decoder = decoders.Sequence(decode)
    # With a prefix, a user-defined token would get a space before it.
    return Built(backend, True, not prefixed)


def _merges_by_score(plain: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns the merges that correspond to SentencePiece's scores, best first.

    SentencePiece merges the pair that gives the best-scored piece. Ties are ordered as Hugging Face does: by length
    of the left part, then of the right part, the longest first, then by token id.
    """
    found: list[tuple[float, int, int, int, int, str, str]] = []
    # This loop splits a quarter of a million tokens at every place and takes most of the time.
    for token, number in plain.items():
        score = -scores[number]
        for cut in range(1, len(token)):
            left = plain.get(token[:cut])
            if left is not None:
                right = plain.get(token[cut:])
                if right is not None:
                    found.append((score, -cut, cut - len(token), left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _with_model(vocabulary: dict[str, int], merges: Any, source: str, **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as problem:  # the library raises plain Exception
        raise ModelError(f"{source}: its vocabulary and merges do not fit together: {problem}") from None
