"""The text of a reference prompt, as transformers' processors make it before they tokenize it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ....runtime.common.errors import InputError
from ....runtime.families.chat import Media, placed
from ....runtime.text.messages import readable
from .base import processor_surrounds

if TYPE_CHECKING:
    from .base import Family


def marked_text(family: Family, prompt: Any, kinds: Sequence[str], media: Media) -> tuple[str, bool]:
    """(the text of a prompt with a mark for each of the media of these `kinds`; whether the tokenizer's special tokens go
    around it). By the chat template where there is one."""
    tokenizer, template = family.checkpoint.tokenizer, family.chat_template
    turns = placed(prompt or "", kinds, template, media)
    if isinstance(turns, str):
        return turns, True
    turns = readable(template or "", turns, tokenizer.special_tokens_map)
    text = tokenizer.apply_chat_template(
        turns, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    return text, processor_surrounds(tokenizer, text)


def marks_in(text: str, marks: Iterable[str]) -> list[str]:
    """Which marks stand in a prompt, in their order."""
    return re.findall("|".join(map(re.escape, marks)), text)


def replaced_marks(text: str, texts: Mapping[str, Iterable[str]]) -> str:
    """A prompt with `texts` in place of its marks, by mark in their order; as `ProcessorMixin.get_text_with_replacements`."""
    waiting = {mark: iter(each) for mark, each in texts.items()}
    return re.sub("|".join(map(re.escape, waiting)), lambda found: next(waiting[found[0]]), text)


def tokenized(family: Family, text: str, add_special_tokens: bool) -> list[int]:
    """Raises `InputError` for a text without tokens."""
    ids = family.checkpoint.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    if not ids:
        raise InputError("the prompt has no tokens; write some text")
    return ids


def token_runs(ids: Iterable[int], tokens: Collection[int]) -> list[tuple[int, int, int]]:
    """(token, first position, end) of each run of one of `tokens` in a prompt."""
    runs, end = [], 0
    for token, run in groupby(ids):
        first, end = end, end + len(list(run))
        if token in tokens:
            runs.append((token, first, end))
    return runs
