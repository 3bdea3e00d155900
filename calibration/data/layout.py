"""How a record is asked: its text, or with earlier turns a conversation, as the model reads one."""

from __future__ import annotations

from typing import Any

from ...runtime.families.base import image_list
from ...runtime.images.video import Video
from .reading.records import Record

_NAMES = {"user": "Question", "assistant": "Answer"}


def prompt_of(record: Record, image: Any, template: bool, vision: bool) -> str | list[dict[str, Any]]:
    """The prompt of a model that has a chat `template` or none, and reads pictures (`vision`) or text only; `image` is
    what is given beside it: a picture, a `Video`, a list of them, or None.

    A record without history is its prompt: the model's family lays it out. With history it is messages, whose contents
    are lists of parts where the template writes pictures. Without a template turns are written one after the other,
    `Question: … Answer: …`, as BLIP-2 is asked in its paper (arXiv 2301.12597).
    """
    if not record.history:
        return record.prompt
    turns = [*record.history, ("user", record.prompt)]
    if not template:
        return " ".join(
            [f"{_NAMES[who]}: {words}" if who in _NAMES else words for who, words in turns] + ["Answer:"]
        )
    kinds = [{"type": "video" if isinstance(one, Video) else "image"} for one in image_list(image)]
    messages: list[dict[str, Any]] = []
    for who, words in turns:
        content: Any = words
        if vision:
            content = [*(kinds if who == "user" else []), {"type": "text", "text": words}]
            kinds = [] if who == "user" else kinds
        messages.append({"role": who, "content": content})
    return messages
