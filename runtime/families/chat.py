"""Conversations with pictures and videos: where they stand in a prompt, and its ids; for every family with a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.errors import BundleError, PromptError
from ..text.chat import render_chat
from ..text.marked import Marked
from ..text.messages import check_messages, check_written, marked_prompt, parts_of, readable, texts
from ..text.prompt import as_text, check_ids, check_length
from .base import Prompt, RawPrompt, Source, View


@dataclass(frozen=True)
class Medium:
    """A kind of thing beside text. `mark` is the token that a template writes for one, `alone` how one stands in text
    that no template lays out, and `name` what a user calls several."""

    mark: str
    alone: str
    name: str


Media = Mapping[str, Medium]
"""Type of a message's part ("image", "video") → what it is."""


def chat_ids(
    bundle: Source, template: str, messages: list[dict[str, Any]], *, processor: bool = False
) -> np.ndarray:
    """int64 [n]: the template's text with the turn of the answer opened.

    A tokenizer leaves every special token to the template. A `processor` puts those of its tokenizer around the text
    (`<s>` of LLaVA), unless the template has begun with the first; as transformers' `apply_chat_template` of either.
    Raises `BundleError` for a broken template, `PromptError` for messages that it refuses or of which it drops a part.
    """
    special = special_tokens(bundle)
    turns = readable(template, messages, special)
    rendered = render_chat(template, turns, special)
    check_written(rendered, turns)
    begin = special.get("bos_token")
    return bundle.tokenizer.encode_laid_out(
        as_text(rendered),
        lambda: marked_prompt(template, turns, special),
        lambda written: processor and not (begin and written.startswith(begin)),
    )


def special_tokens(bundle: Source) -> dict[str, str]:
    """What the chat template of a bundle is given: the tokenizer's own special tokens by name.

    Bundles of older versions do not hold them: then bos and eos are the written forms of the model's.
    """
    text, tokenizer = bundle.manifest.text, bundle.tokenizer
    if text.special_tokens is not None:
        return text.special_tokens
    tokens = {
        "bos_token": tokenizer.token(text.bos_token_id),
        "eos_token": tokenizer.token(next(iter(text.eos_token_ids), None)),
    }
    return {name: token for name, token in tokens.items() if token is not None}


def media_ids(bundle: Source, prompt: Prompt, given: Sequence[str], media: Media) -> np.ndarray:
    """int64 [n]: the ids of a prompt with one mark for each of the media `given`, by type in their order.

    Raises `PromptError` for messages that are none, for a mark that was typed where the template writes them, and for
    another number of marks than media; `BundleError` for a broken template.
    """
    text, tokenizer = bundle.manifest.text, bundle.tokenizer
    bundles_own = prompt is None
    if prompt is None:
        prompt = text.default_prompt or ""
    if isinstance(prompt, list) and not text.chat_template:
        raise PromptError("this bundle has no chat template: give the prompt as text, not as messages")
    asked = prompt if isinstance(prompt, list | RawPrompt) else as_text(prompt)
    turns = placed(asked, given, text.chat_template, media)
    if isinstance(turns, str):
        typed, whole = str(asked), as_text(turns)

        def marked() -> Marked:
            return Marked(whole, {}) if bundles_own else Marked.of_text(typed, turns.removesuffix(typed))

        ids = tokenizer.encode_laid_out(whole, marked, lambda _: True)
    else:
        ids = chat_ids(bundle, text.chat_template or "", turns, processor=True)
    for kind, medium in media.items():
        token, count = tokenizer.id(medium.mark), list(given).count(kind)
        if token is None:
            raise BundleError(f"the tokenizer has no {medium.mark}; build the bundle again")
        marks = int(np.count_nonzero(ids == token))
        if marks != count:
            named = [] if isinstance(turns, str) else parts_of(turns, kind)
            if len(named) == count:
                raise PromptError(
                    f"the chat template writes {marks} {medium.mark} for {count} parts of type {kind!r} "
                    f"({'; '.join(named):.200}); move them into turns of the user, or leave them out"
                )
            raise PromptError(
                f"the prompt has {marks} {medium.mark}, and {count} {medium.name} were given: one for each"
            )
    if not len(ids):
        raise PromptError("the prompt has no tokens; write some text")
    return ids


@dataclass(frozen=True)
class Layout:
    """Ids int64 [n] with a mark for every embedding of the `views`, which stand in the prompt's order; where those are,
    int64 [k], and where each view's begin."""

    ids: np.ndarray
    views: tuple[View, ...]
    slots: np.ndarray
    starts: tuple[int, ...]


def lay_out(bundle: Source, prompt: Prompt, views: Sequence[View], media: Media) -> Layout:
    """The prompt with its pictures and videos in place; of several of a kind, the first mark is the first one's.

    Raises `PromptError` as `media_ids`, and for more positions than the bundle's `max_length`.
    """
    manifest = bundle.manifest
    ids = media_ids(bundle, prompt, [view.kind for view in views], media)
    waiting = {bundle.tokenizer.id(media[kind].mark): [v for v in views if v.kind == kind] for kind in media}
    places = np.flatnonzero(np.isin(ids, [token for token in waiting if token is not None]))
    ordered = tuple(waiting[int(token)].pop(0) for token in ids[places])
    repeats = np.ones(len(ids), np.int64)
    repeats[places] = [view.num_embeds for view in ordered]
    starts = (np.cumsum(repeats) - repeats)[places]
    ids = np.repeat(ids, repeats)
    limit = manifest.limits.max_length
    check_length(ids, limit - 1, f"max_length ({limit}) less one, image rows included")
    check_ids(ids, manifest.text.vocab_size)
    slots = [start + np.arange(view.num_embeds) for start, view in zip(starts, ordered, strict=True)]
    return Layout(
        ids, ordered, np.concatenate(slots) if slots else np.empty(0, np.int64), tuple(starts.tolist())
    )


def placed(
    prompt: str | Sequence[Any], given: Sequence[str], template: Any, media: Media
) -> str | list[dict[str, Any]]:
    """Messages for the chat template, or, without one and for a `RawPrompt`, text with a mark per medium.

    Raises `PromptError` for messages that are none, and for a mark that was typed where the template writes them.
    """
    if not isinstance(prompt, str):
        messages = check_messages(list(prompt), tuple(media))
        for words in texts(messages):
            _refuse_marks(words.text, media)
        return messages
    if not template or isinstance(prompt, RawPrompt):
        if any(medium.mark in prompt for medium in media.values()):
            return prompt
        return "".join(media[kind].alone for kind in given) + prompt
    _refuse_marks(prompt, media)
    content = [*({"type": kind} for kind in given), {"type": "text", "text": prompt}]
    return [{"role": "user", "content": content}]


def _refuse_marks(words: str, media: Media) -> None:
    for medium in media.values():
        if medium.mark in words:
            raise PromptError(
                f"the prompt contains {medium.mark!r}, which stands for one of the {medium.name}: leave it out, or give "
                "the prompt raw"
            )
