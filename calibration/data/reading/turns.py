"""Conversations as LLaVA and ShareGPT write them, a list of `from` and `value`, or as OpenAI does, of `role` and `content`, which
is a text or a list of parts: texts and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ....runtime.common.errors import OptionError
from .arguments import Arguments
from .entries import collect, fields, items
from .files import read_json
from .lines import checked_text
from .records import ImageRef, Problems, Record
from .unread import Unread

ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "bard": "assistant", "bing": "assistant",
    "system": "system",
}  # fmt: skip
PUBLISHED = ("conversations", "model")
"""Fields of an entry in the published files, beside its id and picture: what is read, and who answered."""
PICTURE = "<image>"
PICTURE_PARTS = ("image", "image_url")
PICTURE_FIELDS = ("image", "path", "url", "image_url")
"""Parts of a turn that are pictures, and the fields in which they name a file; one that names none marks the place."""


def turn_records(
    key: str, entry: Any, image: ImageRef | None, name: str = "conversations", unanswered: bool = False
) -> Iterator[Record]:
    """One record per answer of the turns in the field `name`: the words before it are its prompt, all turns before these its
    history. `<image>` is left out of the texts: where a picture stands, the model's own template says.

    ValueError for a turn of nobody known, an answer to nothing, and a conversation without an answer; where it may be
    `unanswered`, a question at its end is a record without one.
    """
    said: list[tuple[str, str]] = []
    made = 0
    for place, turn in enumerate(items(entry, name)):
        who, words = (fields(turn).get(a, turn.get(b)) for a, b in (("from", "role"), ("value", "content")))
        speaker = "from" if "from" in turn else "role"
        role = ROLES.get(who) if isinstance(who, str) else None
        if role is None:
            raise ValueError(f"{name}[{place}]: {speaker} {who!r:.40} is none of {', '.join(ROLES)}")
        words = _words(words, f"{name}[{place}]")
        if role == "assistant":
            if not said:  # ShareGPT's dumps may begin within a conversation
                continue
            if said[-1][0] != "user":
                raise ValueError(f"{name}[{place}]: an answer that follows no question")
            if words:
                made += 1
                yield Record(
                    f"{key}-{made}", said[-1][1], image, words, history=tuple(said[:-1]), references=(words,)
                )
        said.append((role, words))
    asked = bool(said) and said[-1][0] == "user"
    if unanswered and asked:
        yield Record(f"{key}-{made + 1}", said[-1][1], image, history=tuple(said[:-1]))
    elif not made and unanswered:
        raise ValueError(f"{name}: there is neither an answer nor a question at the end")
    elif not made:
        raise ValueError("the conversation has no answer")


def pictures_of(entry: Any, name: str) -> Iterator[str]:
    """The files that parts of the turns in the field `name` show.

    ValueError where a picture stands in another turn than the user's first: a record's picture stands there.
    """
    asked = 0
    for place, turn in enumerate(items(entry, name)):
        user = ROLES.get(str(fields(turn).get("role", turn.get("from")))) == "user"
        asked += user
        content = turn.get("content", turn.get("value"))
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") not in PICTURE_PARTS:
                continue
            if not user or asked > 1:
                raise ValueError(f"{name}[{place}]: a picture is read in the user's first turn alone")
            shown = next((part[field] for field in PICTURE_FIELDS if part.get(field) is not None), None)
            shown = shown.get("url") if isinstance(shown, dict) else shown
            if isinstance(shown, str):
                yield checked_text("image", shown.removeprefix("file://"))
            elif shown is not None:
                raise ValueError(f"{name}[{place}]: the picture is {shown!r:.80}, not a path")


def _words(content: Any, where: str) -> str:
    """The texts of a turn, one after the other. ValueError for anything but a text or a list of texts and pictures."""
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind not in ("text", *PICTURE_PARTS) or (
                kind == "text" and not isinstance(part.get("text"), str)
            ):
                raise ValueError(f"{where}: a part is {part!r:.80}, neither a text nor a picture")
            texts += [part["text"]] if kind == "text" else []
        content = "".join(texts)
    if not isinstance(content, str):
        raise ValueError(f"{where}: value is {content!r:.80}, not a text")
    return checked_text("value", content.replace(PICTURE, "").strip())


def load_conversations(
    arguments: Arguments,
    problems: Problems,
    layout: str,
    picture_of: Callable[[Any], ImageRef | None],
    read: Sequence[str],
) -> list[Record]:
    """Of a file that is a list of conversations, one record per answer, or per conversation with the option `turns=first`.
    What an entry has beside its `conversations`, the fields that `picture_of` has `read`, and those that such files are
    published with, is told to `problems`.

    Raises OptionError for another value of `turns`, and for a file of another layout than `layout`.
    """
    path, turns = arguments.path(0), arguments.options.get("turns", "all")
    if turns not in ("first", "all"):
        raise OptionError(f"{arguments.form}: turns={turns!r:.40} is neither first nor all")
    document = read_json(path)
    if not isinstance(document, list):
        raise OptionError(f"{path} is not a list of conversations: not the layout of {layout}")

    unread = Unread(path)
    known = dict.fromkeys((*PUBLISHED, *read), "")

    def record(number: int, entry: Any) -> Iterator[Record]:
        unread.see(fields(entry), known)
        key = f"{number}-{entry.get('id', '')}"
        records = list(turn_records(key, entry, picture_of(entry)))
        yield from records[:1] if turns == "first" else records

    records = collect(path, "", document, record, problems)
    unread.tell(problems)
    return records
