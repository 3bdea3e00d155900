"""`plain_text` with tokenizers and chat templates of the published kinds: what is typed is text, the rest is as ever."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from vlmexport.runtime.common.errors import PromptError
from vlmexport.runtime.families.chat import chat_ids
from vlmexport.runtime.text.messages import check_messages
from vlmexport.runtime.text.plain import PlainTokenizer
from vlmexport.runtime.text.tokenizer import Tokenizer as Usual

from tests.support.published import layouts, vocabularies

FOREIGN = "<|foreign|>"
"""A special token that no template writes."""
NAMES = [
    "HuggingFaceTB--SmolLM2-135M-Instruct",
    "Qwen--Qwen2.5-VL-3B-Instruct",
    "Qwen--Qwen3-8B",
    "Salesforce--blip2-opt-2.7b",
    "TinyLlama--TinyLlama-1.1B-Chat-v1.0",
    "google--flan-t5-base",
    "llava-hf--llama3-llava-next-8b-hf",
    "llava-hf--llava-1.5-13b-hf",
    "nlpconnect--vit-gpt2-image-captioning",
]
"""Every kind of tokenizer and of template; one of each."""


def template_of(layout: layouts.Layout) -> Any:
    if "chat_template.jinja" in layout.files:
        return layout.files["chat_template.jinja"].read_text("utf-8")
    found = layout.json("chat_template.json") or layout.json("tokenizer_config.json")
    return found.get("chat_template")


@functools.lru_cache
def tokenizers_of(name: str) -> tuple[Usual, PlainTokenizer, Usual, Any, dict[str, str]]:
    """(the usual tokenizer of a layout, the one that reads text only, one without `FOREIGN`, template, special tokens)."""
    layout = layouts.read(name)
    config = layout.json("tokenizer_config.json")
    flags = {
        entry["content"]: {key: entry[key] for key in ("lstrip", "rstrip", "normalized", "special") if key in entry}
        for entry in config.get("added_tokens_decoder", {}).values()
    }  # fmt: skip
    core = vocabularies.tokenizer(layout.tokenizer, layout.tokens, flags)
    without = Usual(Tokenizer.from_str(core.to_str()))
    core.add_special_tokens([AddedToken(FOREIGN, special=True, normalized=False, rstrip=True)])
    special = {key: config[key] for key in ("bos_token", "eos_token") if isinstance(config.get(key), str)}
    usual = Usual(core)
    return usual, PlainTokenizer(usual), without, template_of(layout), special


def source(tokenizer: Usual, special: dict[str, str]) -> Any:
    return SimpleNamespace(
        tokenizer=tokenizer, manifest=SimpleNamespace(text=SimpleNamespace(special_tokens=special))
    )


def texts(specials: list[str]) -> st.SearchStrategy[str]:
    pieces = [
        " ",
        "  ",
        "\n",
        "the",
        "red",
        " cup",
        "\t",
        "größe",
        "你好",
        "<",
        "|",
        "a",
        "É",
        "\U0001f600",
        "1234",
    ]
    return st.lists(st.sampled_from(pieces + specials), max_size=8).map("".join)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_token_ids_equal_the_library_and_back(name: str, data: st.DataObject) -> None:
    usual, _, _, template, special = tokenizers_of(name)
    plain = PlainTokenizer(usual)
    plain._brought = lambda *_: "forced"  # type: ignore[method-assign]
    text, adds = data.draw(texts([])), data.draw(st.booleans())
    assert plain.encode(text, adds).tolist() == usual.encode(text, adds).tolist()
    if template is None or not text.strip():
        return
    messages = check_messages([{"role": "user", "content": text}])
    wanted = chat_ids(source(usual, special), template, messages, processor=adds)
    assert chat_ids(source(plain, special), template, messages, processor=adds).tolist() == wanted.tolist()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_typed_special_tokens_are_the_text_that_the_library_splits(name: str, data: st.DataObject) -> None:
    usual, plain, _, _, _ = tokenizers_of(name)
    typed = sorted(usual.special_tokens.values())
    text, adds = data.draw(texts(typed)), data.draw(st.booleans())
    splitting = Tokenizer.from_str(usual.backend.to_str())
    splitting.encode_special_tokens = True
    wanted = splitting.encode(text, add_special_tokens=adds)
    unknown = usual.backend.encode("\U0010ffff", add_special_tokens=False).ids
    held = [
        i
        for i, mask in zip(wanted.ids, wanted.special_tokens_mask, strict=True)
        if not mask and i in usual.special_ids and i not in unknown
    ]
    if held:  # words of a Unigram model
        with pytest.raises(
            PromptError,
            match=r"^plain_text: the prompt contains '.*', a special token, which this tokenizer cannot read as text; leave",
        ):
            plain.encode(text, adds)
        return
    assert plain.encode(text, adds).tolist() == wanted.ids


@pytest.mark.parametrize("name", [name for name in NAMES if tokenizers_of(name)[3]])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_only_templates_write_special_tokens(name: str, data: st.DataObject) -> None:
    usual, plain, without, template, special = tokenizers_of(name)
    typed = sorted({token for token in usual.special_tokens.values() if "image" not in token})

    def talk(strategy: st.SearchStrategy[str]) -> list[Any]:
        said = [data.draw(strategy.map(lambda text: text + " cup")) for _ in range(3)]
        return check_messages([{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), said, strict=True)])  # fmt: skip

    def ids(tokenizer: Usual, messages: list[Any]) -> np.ndarray:
        return chat_ids(source(tokenizer, special), template, messages, processor=True)

    messages = talk(texts([FOREIGN]))
    assert ids(plain, messages).tolist() == ids(without, messages).tolist()
    innocent = [{**message, "content": "cup"} for message in messages]
    wanted = [i for i in ids(usual, innocent).tolist() if i in usual.special_ids]
    found = ids(plain, talk(texts(typed)))
    unknown = usual.backend.encode("\U0010ffff", add_special_tokens=False).ids
    assert [i for i in found.tolist() if i in usual.special_ids and i not in unknown] == wanted
