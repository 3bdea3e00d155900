"""Messages of a conversation: checked, and in the form that a chat template writes in full.

A template drops without a word what it does not look for: text where it goes over parts, a turn of a role that it does
not know. What that would be shows where each text is replaced by a mark of its own: a mark that is not written is a text
that the model would never see.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from ..common.errors import PromptError
from ..common.foreign_errors import raise_if_foreign
from .chat import render_chat
from .marked import MARK, Marked
from .meter import TooMuch

Message: TypeAlias = "dict[str, Any]"

_MEDIA = {"image": "PICTURE", "video": "VIDEO"}


class Text(NamedTuple):
    """A text of a conversation: the number of its message, that of its part (None where the content is text), the
    message's role, and the text."""

    message: int
    part: int | None
    role: str
    text: str

    @property
    def name(self) -> str:
        """As an error names it."""
        return f"message {self.message}" if self.part is None else f"message {self.message}, part {self.part}"


def check_messages(messages: Sequence[Any], kinds: Sequence[str] = ()) -> list[Message]:
    """Messages with a `role` and a `content`: text, or a list of parts, each text or of one of the `kinds`.

    Raises `PromptError` naming the message and the part.
    """
    if not messages:
        raise PromptError("the list of messages is empty; give at least one")
    return [_checked(f"message {at}", message, kinds) for at, message in enumerate(messages)]


def _checked(name: str, message: Any, kinds: Sequence[str]) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        raise PromptError(f"{name} is not an object with 'role' and 'content': {message!r:.80}")
    fields = {  # in the order of the caller's, which a template may write
        field: value if field in ("role", "content") else _plain(value, f"{name}: its field {field!r:.40}")
        for field, value in message.items()
        if field == "content" or value is not None
    }
    content = message["content"]
    if isinstance(content, str):
        return fields
    if not isinstance(content, list | tuple):
        raise PromptError(f"{name}: its content is {type(content).__name__}, not text or a list of parts")
    for number, part in enumerate(content):
        _check_part(f"{name}, part {number}", part, kinds)
    return {**fields, "content": list(content)}


def _check_part(name: str, part: Any, kinds: Sequence[str]) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{name}: its text is {type(part.get('text')).__name__}, not text")
        read = ("type", "text")
    elif not isinstance(kind, str) or kind not in kinds:
        known = ", ".join(("text", *kinds))
        what = f"{name} has no type" if kind is None else f"{name}: its type {kind!r:.40} is not known"
        raise PromptError(f"{what} ({known}); {_remedy(part, kind, kinds)}")
    else:
        read = ("type",)
    if unread := [str(key) for key, value in part.items() if key not in read and value is not None]:
        raise PromptError(f"{name}: {unread[0]!r:.40} of a part of type {kind!r} is not read; leave it out")


def _plain(value: Any, name: str) -> Any:
    """What JSON holds of a field that only the template reads: it sees no objects of the caller's."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise_if_foreign(error)
        raise PromptError(f"{name} is not data as JSON holds it ({error}); leave it out") from error


def _remedy(part: Any, kind: Any, kinds: Sequence[str]) -> str:
    """What to write in place of a part of a type that is not known."""
    description = f"{kind} {' '.join(map(str, part))}" if isinstance(part, dict) else "text"
    for medium in _MEDIA:
        if medium in description:
            if medium not in kinds:
                return f"this model reads no {medium}s: leave it out"
            return f'write {{"type": "{medium}", "{medium}": {_MEDIA[medium]}}}'
    return 'write {"type": "text", "text": TEXT}' if "text" in description else "leave it out"


def texts(messages: Sequence[Message]) -> Iterator[Text]:
    """Every text of checked messages, in order."""
    for at, message in enumerate(messages):
        content, role = message["content"], message["role"]
        if isinstance(content, str):
            yield Text(at, None, role, content)
            continue
        for number, part in enumerate(content):
            if part["type"] == "text":
                yield Text(at, number, role, part["text"])


def parts_of(messages: Sequence[Message], kind: str) -> list[str]:
    """Names of the parts of checked messages that are of this type, in order."""
    return [
        f"message {at}, part {number}"
        for at, message in enumerate(messages)
        if not isinstance(message["content"], str)
        for number, part in enumerate(message["content"])
        if part["type"] == kind
    ]


def readable(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> list[Message]:
    """Checked messages in a form that the template writes in full: as they are; with contents that are text as one part
    of text; with contents that are parts of text as that text, a line each.

    Raises `PromptError` naming what is written in none of them, a role that the template takes for another, or a field
    that it does not read; `BundleError` for a broken template.
    """
    failures: list[tuple[int, PromptError]] = []
    for form in (list(messages), _as_parts(messages), _as_text(messages)):
        if form is None:
            continue
        marked = _marked(form)
        try:
            rendered = _rendered(template, marked, special_tokens)
        except TooMuch:
            raise
        except PromptError as error:
            failures.append((len(form) + 1, error))
            continue
        lost = _lost(form, marked, rendered)
        if not lost:
            _check_roles(template, marked, special_tokens, rendered)
            _check_fields(template, marked, special_tokens, rendered)
            return form
        failures.append((len({text.message for text in lost}), _dropped(lost[0])))
    raise min(failures, key=lambda failure: failure[0])[1]


def check_written(rendered: str, messages: Sequence[Message]) -> None:
    """Every text of the user, and of the system, stands in what a template wrote, white space at its ends aside.

    Answers are not looked for: templates may leave the reasoning of earlier ones out. Raises `PromptError`.
    """
    prompt_texts = [text for text in texts(messages) if text.role in ("user", "system")]
    lost = _missing(rendered, [(text, text.text.strip()) for text in prompt_texts])
    if lost:
        raise _dropped(lost[0])


def marked_prompt(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> Marked:
    """What the template makes of messages, `readable` ones, with a mark in place of each text."""
    marked = _marked(messages)
    pairs = zip(texts(marked), texts(messages), strict=True)
    rendered = render_chat(
        template, marked, special_tokens
    )  # not the kept one: a template may write the date
    fields = ([value for key, value in message.items() if key != "content"] for message in messages)
    return Marked(
        rendered,
        {mark.text: text.text for mark, text in pairs if text.text.strip()},
        tuple(_strings(list(fields))),
    )


def _strings(value: Any) -> Iterator[str]:
    """Every string within data of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _as_parts(messages: Sequence[Message]) -> list[Message] | None:
    if not any(isinstance(message["content"], str) for message in messages):
        return None
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]


def _as_text(messages: Sequence[Message]) -> list[Message] | None:
    lists = [message["content"] for message in messages if not isinstance(message["content"], str)]
    if not lists or any(part["type"] != "text" for content in lists for part in content):
        return None
    return [{**message, "content": "\n".join(text.text for text in texts([message]))} for message in messages]


def _dropped(text: Text) -> PromptError:
    elsewhere = "" if text.role == "user" else "put it into a turn of the user, "
    return PromptError(
        f"the chat template does not write {text.name} (role {text.role!r:.40}): {text.text!r:.60}; {elsewhere}leave it "
        "out, or give the prompt raw"
    )


# --- what a template does with messages of this shape ---


def _lost(messages: Sequence[Message], marked: Sequence[Message], rendered: str) -> list[Text]:
    """The texts that the template does not write, or not in their order: `rendered` is what it makes of `marked`."""
    marks = [mark for mark in texts(marked) if mark.text.strip()]
    originals = [text for text in texts(messages) if text.text.strip()]
    for mark in marks:  # a list that is written as Python or JSON writes it is not laid out
        for quote in "'\"":
            rendered = rendered.replace(f"{quote}text{quote}: {quote}{mark.text}{quote}", "")
    return _missing(rendered, [(text, mark.text) for text, mark in zip(originals, marks, strict=True)])


def _missing(rendered: str, expected: Sequence[tuple[Text, str]]) -> list[Text]:
    """The texts whose words do not stand in `rendered` behind those before. The system's stand anywhere: templates put
    them before the first turn, or into the last."""
    lost, behind = [], 0
    for text, words in expected:
        at = rendered.find(words, 0 if text.role == "system" else behind)
        if at < 0:
            lost.append(text)
        elif text.role != "system":
            behind = at + len(words)
    return lost


def _check_roles(
    template: str, marked: Sequence[Message], special_tokens: Mapping[str, str], rendered: str
) -> None:
    """No turn stands as one of another role would."""
    for role in dict.fromkeys(message["role"] for message in marked):
        for other in ("user", "assistant") if role != "user" else ():
            renamed = [{**m, "role": other} if m["role"] == role else m for m in marked]
            if role != other and _same(template, renamed, special_tokens, rendered):
                at = next(i for i, message in enumerate(marked) if message["role"] == role)
                raise PromptError(
                    f"the chat template writes message {at} of role {role!r:.40} as if its role were {other!r}; put it "
                    "into a turn of the user, or give the prompt raw"
                )


def _check_fields(
    template: str, marked: Sequence[Message], special_tokens: Mapping[str, str], rendered: str
) -> None:
    """Fields beside role and content are read by the template."""
    for field in dict.fromkeys(key for message in marked for key in message):
        if field in ("role", "content"):
            continue
        without = [{key: value for key, value in m.items() if key != field} for m in marked]
        if _same(template, without, special_tokens, rendered):
            at = next(i for i, message in enumerate(marked) if field in message)
            raise PromptError(
                f"message {at}: the chat template does not read its field {field!r:.40}; leave it out"
            )


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The messages with a mark for each text that is not white space alone."""
    words = map(MARK.format, itertools.count())

    def mark(text: str) -> str:
        return next(words) if text.strip() else text

    return [
        {
            **message,
            "content": mark(message["content"])
            if isinstance(message["content"], str)
            else [
                {**part, "text": mark(part["text"])} if part["type"] == "text" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def _same(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], rendered: str
) -> bool:
    """Whether other messages are written like those that became `rendered`."""
    try:
        return _rendered(template, messages, special_tokens) == rendered
    except TooMuch:
        raise
    except PromptError:  # the template refuses them: it tells the two apart
        return False


def _rendered(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
    return _rendered_once(template, json.dumps(messages), tuple(sorted(special_tokens.items())))


@lru_cache(maxsize=64)
def _rendered_once(template: str, messages: str, special_tokens: tuple[tuple[str, str], ...]) -> str:
    """Conversations of one shape are many: every frame of a robot is asked about in the same one."""
    return render_chat(template, json.loads(messages), dict(special_tokens))
