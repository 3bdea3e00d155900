"""The bytes of tokens, joined, are the text that they decode to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vlmexport.runtime.text.token_bytes import token_bytes
from vlmexport.runtime.text.tokenizer import Tokenizer

from tests.support.handmade_bundle import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer


@pytest.mark.parametrize("make", [metaspace_tokenizer, byte_level_tokenizer, byte_fallback_tokenizer])
def test_joined_they_are_the_text(make: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(make())
    for text in ("a red cube", "a b  c", "grün"):
        ids = [int(each) for each in tokenizer.encode(text)]
        plain = [each for each in ids if each not in tokenizer.special_ids]
        joined = b"".join(token_bytes(tokenizer, each) for each in plain).decode("utf-8", "replace")
        assert joined.strip() == tokenizer.decode(plain).strip()
    assert token_bytes(tokenizer, 10**6) == b""
    for token in tokenizer.special_ids:
        assert token_bytes(tokenizer, token).decode() == tokenizer.token(token)


def test_parts_of_a_character_are_bytes() -> None:
    tokenizer = Tokenizer(byte_fallback_tokenizer())
    found = [token_bytes(tokenizer, each) for each in sorted(tokenizer.byte_ids)]
    assert found and all(len(each) == 1 for each in found)
