"""Text that streams is the text that decoding everything at once would give."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.test_tokenizer import SPECIAL, TEXTS, TOKENS, from_gguf, piece_tokenizer

from outrider.engine.detokenize import BYTE_OF, Detokenizer
from outrider.models.tokenizer import Tokenizer


@cache
def byte_level() -> Tokenizer:
    tokens = [*TOKENS, "<a tool>", "Ünïcode☃"]
    types = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)) + [4, 4]
    return from_gguf("smollm", tokens=tokens, token_type=types)


@cache
def pieces(prefix: bool) -> Tokenizer:
    return piece_tokenizer(bos_token_id=1, eos_token_id=2, add_space_prefix=prefix)


TOKENIZERS = {
    "byte level": byte_level,
    "pieces, first space stripped": lambda: pieces(True),
    "pieces": lambda: pieces(False),
}


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_the_same_text(name: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    # Past the end too: a model's vocabulary may be padded.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_bytes_in_any_order_give_the_same_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    spelt = {byte: character for character, byte in BYTE_OF.items()}
    raw = data.draw(
        st.lists(st.sampled_from([*"é漢👩".encode(), 0x41, 0x80, 0xC0, 0xED, 0xA0, 0xF4, 0xFF]), max_size=20)
    )
    spelling = spelt.__getitem__ if name == "byte level" else "<0x{:02X}>".format
    ids = [tokenizer.token_id(spelling(byte)) for byte in raw]
    known = [token_id for token_id in ids if token_id is not None]
    assert len(known) == len(raw)
    assert "".join(streamed(tokenizer, known)) == tokenizer.decode(known)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_half_a_character_is_never_shown(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text)
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts)


def test_characters_come_as_soon_as_they_are_whole() -> None:
    tokenizer = byte_level()
    spelt = {byte: character for character, byte in BYTE_OF.items()}
    ids = [tokenizer.token_id(spelt[byte]) for byte in "a👩b".encode()]
    assert streamed(tokenizer, [token_id for token_id in ids if token_id is not None]) == [
        "a", "", "", "", "👩", "b", "",
    ]  # fmt: skip


def test_bytes_that_never_became_a_character_come_out_at_the_end() -> None:
    tokenizer = pieces(True)
    half = [tokenizer.token_id("<0xE6>"), tokenizer.token_id("<0xBC>")]
    assert streamed(tokenizer, [token_id for token_id in half if token_id is not None]) == ["", "", "\ufffd\ufffd"]
