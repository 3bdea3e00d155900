"""Pictures and videos that parts of messages bring along, as transformers' processors take them."""

from __future__ import annotations

from typing import Any

from ..common.errors import PromptError
from .base import Prompt, View

PLACES = {"image": ("image", "url", "path"), "video": ("video", "url", "path")}
"""Type of a part → where it may hold its picture or video."""


def gather_media(media: list[Any], prompt: Prompt) -> tuple[list[Any], Prompt]:
    """(`media`, or what the parts of the messages hold, in their order; messages whose parts only say where each stands).

    What a part holds is whatever may be given beside the prompt. A second call with its result changes nothing. Raises
    `PromptError` for a part that holds something where there are `media`, too, or that holds two.
    """
    if not isinstance(prompt, list | tuple):
        return media, prompt
    all_media: list[Any] = []
    turns = []
    for at, message in enumerate(prompt):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list | tuple):
            turns.append(message)
            continue
        parts = []
        for number, part in enumerate(content):
            part_media, rest = _held(part, f"message {at}, part {number}")
            if part_media and media:
                raise PromptError(
                    f"message {at}, part {number}: its {part['type']} is given in the part, and {len(media)} beside the "
                    "messages: give all in parts, or all beside them"
                )
            all_media += part_media
            parts.append(rest)
        turns.append({**message, "content": parts})
    return media or all_media, turns


def _held(part: Any, name: str) -> tuple[list[Any], Any]:
    """(what a part holds, none or one; the part without it)."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in PLACES:
        return [], part
    held = {place: part[place] for place in PLACES[kind] if part.get(place) is not None}
    if len(held) > 1:
        raise PromptError(
            f"{name}: its {kind} is given twice, as {' and as '.join(held)}: leave one of them out"
        )
    rest = {key: value for key, value in part.items() if key not in PLACES[kind]}
    return [_video(value) if kind == "video" else value for value in held.values()], rest


def _video(value: Any) -> Any:
    from ..images.video import Video  # a text model needs no Pillow

    return value if isinstance(value, View | Video) else Video(value)
