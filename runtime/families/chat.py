"""Conversations with pictures and videos: where they stand in a prompt, and its ids; for every family with a template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.errors import BundleError, PromptError
from ..text.chat import render_chat
from ..text.marked import LaidOut, Marked
from ..text.messages import check_messages, check_written, marked_prompt, parts_of, readable, texts
from ..text.prompt import as_text, check_ids, check_length
from .base import Prompt, RawPrompt, Source, View


@dataclass(frozen=True)
class Medium:
    """A kind of thing beside text. `mark` is what a template writes for one, `alone` how one stands in text that no template
    lays out, `name` what a user calls several, and `slot` the token that holds the place of an embedding, None: the mark."""

    mark: str
    alone: str
    name: str
    slot: str | None = None

    @property
    def placeholder(self) -> str:
        """The token in place of each embedding."""
        return self.slot or self.mark


Media = Mapping[str, Medium]
"""Type of a message's part ("image", "video") → what it is."""


def chat_ids(
    bundle: Source, template: str, messages: list[dict[str, Any]], *, processor: bool = False
) -> np.ndarray:
    """int64 [n]: see `chat_text`."""
    return bundle.tokenizer.encode_laid_out(chat_text(bundle, template, messages, processor=processor))


def chat_text(
    bundle: Source, template: str, messages: list[dict[str, Any]], *, processor: bool = False
) -> LaidOut:
    """The template's text with the turn of the answer opened.

    A tokenizer leaves every special token to the template. A `processor` puts those of its tokenizer around the text
    (`<s>` of LLaVA), unless the template has begun with the first; as transformers' `apply_chat_template` of either.
    Raises `BundleError` for a broken template, `PromptError` for messages that it refuses or of which it drops a part.
    """
    special = special_tokens(bundle)
    turns = readable(template, messages, special)
    rendered = render_chat(template, turns, special)
    check_written(rendered, turns)
    begin = special.get("bos_token")
    return LaidOut(
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


def media_ids(
    bundle: Source, prompt: Prompt, given: Sequence[str], media: Media, texts: Sequence[str] | None = None
) -> tuple[np.ndarray, tuple[int, ...]]:
    """(int64 [n]: the ids of a prompt in which each of the media `given`, by type in their order, has become its text; which
    of them stands first, second, …). `texts` are these; None: their marks.

    They are put into the text before it is tokenized: a line end of the template's and one that a picture begins with are one
    token. Raises `PromptError` for messages that are none, for a mark that was typed where the template writes them, and for
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

        laid = LaidOut(whole, marked, lambda _: True)
    else:
        laid = chat_text(bundle, text.chat_template or "", turns, processor=True)
    for medium in media.values():
        if tokenizer.id(medium.placeholder) is None:
            raise BundleError(f"the tokenizer has no {medium.placeholder}; build the bundle again")
    named = {kind: [] if isinstance(turns, str) else parts_of(turns, kind) for kind in media}
    placing = _Placing(tuple(given), tuple(texts or (media[kind].mark for kind in given)), media, named)
    layout = tokenizer.layout_of(laid)
    order = placing.order(layout.literals)
    whole, layout = layout.changed(laid.text, placing.place)
    ids = tokenizer.encode_laid_out(LaidOut(whole, lambda: layout, laid.add_special_tokens))
    if not len(ids):
        raise PromptError("the prompt has no tokens; write some text")
    return ids, order


@dataclass(frozen=True)
class _Placing:
    """Puts `texts` of the media `given` in place of their marks; `named` are parts of messages by kind, for errors."""

    given: tuple[str, ...]
    texts: tuple[str, ...]
    media: Media
    named: Mapping[str, list[str]]

    def order(self, literals: Sequence[str]) -> tuple[int, ...]:
        """Which of the media each mark stands for; of several of a kind, the first mark is the first one's."""
        kinds = {medium.mark: kind for kind, medium in self.media.items()}
        found = [kinds[mark] for literal in literals for mark in self._marks.findall(literal)]
        for kind in self.media:
            self._check(kind, found.count(kind))
        waiting = {
            kind: iter([at for at, own in enumerate(self.given) if own == kind]) for kind in self.media
        }
        return tuple(next(waiting[kind]) for kind in found)

    def place(self, literals: Sequence[str]) -> list[str]:
        """The literals of a prompt with texts in place of marks."""
        texts = iter([self.texts[at] for at in self.order(literals)])
        return [self._marks.sub(lambda _: next(texts), literal) for literal in literals]

    @property
    def _marks(self) -> re.Pattern[str]:
        marks = sorted((medium.mark for medium in self.media.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, marks)))

    def _check(self, kind: str, marks: int) -> None:
        medium, count, named = self.media[kind], self.given.count(kind), self.named[kind]
        if marks == count:
            return
        if named and len(named) == count:
            raise PromptError(
                f"the chat template writes {marks} {medium.mark} for {count} parts of type {kind!r} "
                f"({'; '.join(named):.200}); move them into turns of the user, or leave them out"
            )
        raise PromptError(
            f"the prompt has {marks} {medium.mark}, and {count} {medium.name} were given: one for each"
        )


@dataclass(frozen=True)
class Layout:
    """Ids int64 [n] with a placeholder for every embedding of the `views`, which stand in the prompt's order; where those are,
    int64 [k], and where each of `View.spans` begins, of each view."""

    ids: np.ndarray
    views: tuple[View, ...]
    slots: np.ndarray
    starts: tuple[tuple[int, ...], ...]


def lay_out(bundle: Source, prompt: Prompt, views: Sequence[View], media: Media) -> Layout:
    """The prompt with its pictures and videos in place.

    Raises `PromptError` as `media_ids`, for more positions than the bundle's `max_length`, and for a placeholder that was
    typed.
    """
    manifest, tokenizer = bundle.manifest, bundle.tokenizer
    texts = [_text_of(view, media[view.kind]) for view in views]
    ids, order = media_ids(bundle, prompt, [view.kind for view in views], media, texts)
    ordered = tuple(views[at] for at in order)
    placeholders = {kind: tokenizer.id(medium.placeholder) for kind, medium in media.items()}
    spans = [span for view in ordered for span in view.spans]
    places = np.flatnonzero(np.isin(ids, [i for i in placeholders.values() if i is not None]))
    wanted = [placeholders[view.kind] for view in ordered for _ in view.spans]
    if ids[places].tolist() != wanted:
        names = " and ".join(dict.fromkeys(medium.placeholder for medium in media.values()))
        raise PromptError(
            f"the prompt has {len(places)} {names}, and what was given takes {len(wanted)}: leave them out of the text"
        )
    repeats = np.ones(len(ids), np.int64)
    repeats[places] = spans
    starts = (np.cumsum(repeats) - repeats)[places]
    ids = np.repeat(ids, repeats)
    limit = manifest.limits.max_length
    check_length(ids, limit - 1, f"max_length ({limit}) less one, image rows included")
    check_ids(ids, manifest.text.vocab_size)
    slots = [start + np.arange(span) for start, span in zip(starts, spans, strict=True)]
    each = iter(starts.tolist())
    return Layout(
        ids,
        ordered,
        np.concatenate(slots) if slots else np.empty(0, np.int64),
        tuple(tuple(next(each) for _ in view.spans) for view in ordered),
    )


def _text_of(view: View, medium: Medium) -> str:
    """What a view becomes, with one placeholder for each of its spans: the tokenizer reads it faster than hundreds."""
    pieces = view.written or (view.num_embeds,)
    return "".join(medium.placeholder if isinstance(piece, int) else piece for piece in pieces)


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
        for mark in (medium.mark, medium.placeholder):
            if mark in words:
                raise PromptError(
                    f"the prompt contains {mark!r}, which stands for one of the {medium.name}: leave it out, or give the "
                    "prompt raw"
                )
