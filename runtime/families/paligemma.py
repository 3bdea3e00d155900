"""PaliGemma: pictures in front of a text, as `PaliGemmaProcessor` lays them out. All rows of a prompt see each other, and
positions count from 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.errors import PromptError
from ..text.marked import LaidOut, Marked
from ..text.prompt import as_text, check_ids, check_length
from .base import Prepared, Prompt, Source, View, image_list, needs_picture, views_of
from .chat import special_tokens
from .fixed import fixed_view, incomplete

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

FIRST_POSITION = 1
"""Of a prompt."""

TEXT = "Qtext0Q"
"""Stands for the caller's text where layout and text are told apart."""


class PaliGemma:
    """Source of the layout: transformers `PaliGemmaProcessor.prepare_inputs_layout` and `PaliGemmaModel.forward`."""

    name = "paligemma"
    needs_picture = True

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; every picture is `text.image_rows` embeddings."""
        lacking = incomplete(self.name, "image", "text.image_token_id", "text.image_rows")
        return fixed_view(bundle, image, lacking)

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """The pictures, the begin token, the text (the bundle's default when None) and a line end. Text may hold `<image>`
        itself, once for each picture: then the begin token stands behind the last. Raises `ImageError` without a picture,
        `PromptError` for messages: there is no chat template."""
        manifest, tokenizer = bundle.manifest, bundle.tokenizer
        token = manifest.text.image_token_id
        mark, begin = tokenizer.token(token), special_tokens(bundle).get("bos_token")
        if mark is None or begin is None:
            raise incomplete(self.name, "image", "text.image_token_id", "text.bos_token_id")
        if isinstance(prompt, list | tuple):
            raise PromptError("this model has no chat template: give the prompt as text, not as messages")
        images = image_list(image)
        if not images:
            raise needs_picture()
        views = views_of(self, bundle, images)
        text = as_text(manifest.text.default_prompt or "" if prompt is None else prompt)
        ids = _encoded(tokenizer, text, mark, begin, len(views))
        marks = int((ids == token).sum())
        if marks != len(views):
            raise PromptError(
                f"the prompt has {marks} {mark}, and {len(views)} pictures were given: one for each"
            )
        repeats = np.ones(len(ids), np.int64)
        repeats[ids == token] = [view.num_embeds for view in views]
        ids = np.repeat(ids, repeats)
        limit = manifest.limits.max_length
        check_length(ids, limit - 1, f"max_length ({limit}) less one, image rows included")
        check_ids(ids, manifest.text.vocab_size)
        positions = np.arange(FIRST_POSITION, FIRST_POSITION + len(ids), dtype=np.int64)[None]
        slots = np.flatnonzero(ids == token)
        return Prepared(ids, tuple(views), slots, positions, blocks=((0, len(ids)),))


def _encoded(tokenizer: Tokenizer, text: str, mark: str, begin: str, pictures: int) -> np.ndarray:
    """Ids int64 [n] of the prompt, with one mark for each picture: in front, or where the text holds them."""
    before, behind = f"{mark * pictures}{begin}", "\n"
    layout = Marked(f"{before}{TEXT}{behind}", {TEXT: text})
    laid = LaidOut(f"{before}{text}{behind}", lambda: layout, lambda _: False)
    found = sum(literal.count(mark) for literal in tokenizer.layout_of(laid).literals)
    if found == pictures:
        return tokenizer.encode_laid_out(laid)
    end = text.rindex(mark) + len(mark)
    return tokenizer.encode(f"{text[:end]}{begin}{text[end:]}{behind}", add_special_tokens=False)
