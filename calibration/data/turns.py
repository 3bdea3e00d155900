"""Conversations as LLaVA and ShareGPT write them, a list of `from` and `value`, or of `role` and `content`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...runtime.errors import OptionError
from .arguments import Arguments
from .entries import collect, fields, items, read_json
from .lines import checked_text
from .records import ImageRef, Problems, Record

ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "bard": "assistant", "bing": "assistant",
    "system": "system",
}  # fmt: skip
PICTURE = "<image>"


def turn_records(key: str, entry: Any, image: ImageRef | None) -> Iterator[Record]:
    """One record per answer: the words before it are its prompt, all turns before these its history. `<image>` is left
    out of the texts: where a picture stands, the model's own template says.

    ValueError for a turn of nobody known, an answer to nothing, and a conversation without an answer.
    """
    said: list[tuple[str, str]] = []
    made = 0
    for place, turn in enumerate(items(entry, "conversations")):
        who, words = (fields(turn).get(a, turn.get(b)) for a, b in (("from", "role"), ("value", "content")))
        role = ROLES.get(who) if isinstance(who, str) else None
        if role is None:
            raise ValueError(f"conversations[{place}]: from {who!r:.40} is none of {', '.join(ROLES)}")
        if not isinstance(words, str):
            raise ValueError(f"conversations[{place}]: value is {words!r:.80}, not a text")
        words = checked_text("value", words.replace(PICTURE, "").strip())
        if role == "assistant":
            if not said:  # ShareGPT's dumps may begin within a conversation
                continue
            if said[-1][0] != "user":
                raise ValueError(f"conversations[{place}]: an answer that follows no question")
            if words:
                made += 1
                yield Record(
                    f"{key}-{made}", said[-1][1], image, words, history=tuple(said[:-1]), references=(words,)
                )
        said.append((role, words))
    if not made:
        raise ValueError("the conversation has no answer")


def load_conversations(
    arguments: Arguments, problems: Problems, layout: str, picture_of: Callable[[Any], ImageRef | None]
) -> list[Record]:
    """Of a file that is a list of conversations, one record per answer, or per conversation with the option `turns=first`.

    Raises OptionError for another value of `turns`, and for a file of another layout than `layout`.
    """
    path, turns = arguments.path(0), arguments.options.get("turns", "all")
    if turns not in ("first", "all"):
        raise OptionError(f"{arguments.form}: turns={turns!r:.40} is neither first nor all")
    document = read_json(path)
    if not isinstance(document, list):
        raise OptionError(f"{path} is not a list of conversations: not the layout of {layout}")

    def record(number: int, entry: Any) -> Iterator[Record]:
        key = f"{number}-{fields(entry).get('id', '')}"
        found = list(turn_records(key, entry, picture_of(entry)))
        yield from found[:1] if turns == "first" else found

    return collect(path, "", document, record, problems)
