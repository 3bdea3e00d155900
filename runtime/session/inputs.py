"""What a request is about, in the words of a caller: pictures, videos, a prompt or messages."""

from __future__ import annotations

from typing import Any

from ..common.errors import OptionError
from ..families.base import Prompt, View, image_list

NAMES = ("image", "images", "video", "prompt", "messages")
"""Of `Session.generate`'s arguments."""


def request_inputs(
    image: Any = None, prompt: Any = None, images: Any = None, video: Any = None, messages: Any = None
) -> tuple[list[Any], Prompt]:
    """(pictures, then videos; prompt). `images` is another word for a list of `image`, `messages` for a prompt of
    messages. A `video` is what `Video` takes, a `Video`, or a list of them.

    Raises `OptionError` for both words at once.
    """
    for one, other in (((image, "image"), (images, "images")), ((prompt, "prompt"), (messages, "messages"))):
        if one[0] is not None and other[0] is not None:
            raise OptionError(
                f"{one[1]} and {other[1]} are two words for the same argument; give one of them"
            )
    found = image_list(images if image is None else image)
    if video is not None:
        found += _videos(video)
    return found, messages if prompt is None else prompt


def _videos(video: Any) -> list[Any]:
    from ..images.video import Video  # a text model needs no Pillow

    if isinstance(video, View):
        return [video]
    if isinstance(video, list | tuple) and video and all(isinstance(each, Video | View) for each in video):
        return list(video)
    return [video if isinstance(video, Video) else Video(video)]
