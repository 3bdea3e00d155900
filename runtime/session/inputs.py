"""What a request is about: pictures, videos, a prompt or messages; from a caller's words to what a family laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..common.errors import ImageError, OptionError, PromptError
from ..common.validation import integer
from ..families.base import Prompt, View, image_list
from ..families.parts import gather_media

if TYPE_CHECKING:
    from ..families.base import Family, Prepared, Source

NAMES = ("image", "images", "video", "prompt", "messages")
"""Of `Session.generate`'s arguments."""

INT64 = 2**63 - 1


class RequestInputs(NamedTuple):
    """Pictures, then videos; and the prompt."""

    media: list[Any]
    prompt: Prompt

    @classmethod
    def of(
        cls,
        image: Any = None,
        prompt: Any = None,
        images: Any = None,
        video: Any = None,
        messages: Any = None,
    ) -> RequestInputs:
        """`images` is another word for a list of `image`, `messages` for a prompt of messages. A `video` is what `Video`
        takes, a `Video`, or a list of them.

        Raises `OptionError` for both words at once.
        """
        for one, other in (
            ((image, "image"), (images, "images")),
            ((prompt, "prompt"), (messages, "messages")),
        ):
            if one[0] is not None and other[0] is not None:
                raise OptionError(
                    f"{one[1]} and {other[1]} are two words for the same argument; give one of them"
                )
        media = image_list(images if image is None else image)
        if video is not None:
            media += _videos(video)
        return cls(media, messages if prompt is None else prompt)

    def prepare(self, family: Family, bundle: Source, channels: str, fingerprint: str | None) -> Prepared:
        """Laid out for the model of this `fingerprint`. Raises `InputError`."""
        media, prompt = gather_media(*self)
        for each in media:
            if isinstance(each, View) and each.model not in (None, fingerprint):
                raise ImageError(
                    "an encoded picture is another model's; encode it with a session of this one"
                )
        return family.prepare(bundle, in_colour_order(media, channels), prompt)


def _videos(video: Any) -> list[Any]:
    from ..images.video import Video  # a text model needs no Pillow

    if isinstance(video, View):
        return [video]
    if isinstance(video, list | tuple) and video and all(isinstance(each, Video | View) for each in video):
        return list(video)
    return [video if isinstance(video, Video) else Video(video)]


def in_colour_order(media: list[Any], channels: str) -> list[Any]:
    """Arrays, and videos of them, whose colours are in another order than RGB, as what knows its order."""
    if channels == "rgb" or not media:
        return media
    from ..images.load import load_image  # a text model needs no Pillow
    from ..images.video import Video

    def ordered(each: Any) -> Any:
        if isinstance(each, View):
            return each
        if isinstance(each, Video):
            return replace(each, channels=channels)
        return load_image(each, channels)

    return [ordered(each) for each in media]


def token_array(token_ids: Sequence[int]) -> np.ndarray:
    """int64 [n] of a prompt of ids. Raises `PromptError`; the decoder checks the vocabulary."""
    if not isinstance(token_ids, list | tuple | range | np.ndarray) or np.ndim(token_ids) == 0:
        raise PromptError(f"token_ids: {token_ids!r:.80} is not a list of token ids")
    try:
        return np.asarray([integer("token_ids", token, 0, INT64) for token in token_ids], np.int64)
    except OptionError as error:
        raise PromptError(str(error)) from None
