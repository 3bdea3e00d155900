"""People's own JSONL: an object a line, in the words that the field uses.

| field | value |
|---|---|
| `prompt`, or `question` | what is asked |
| `messages`, or `conversations` | turns, as OpenAI and ShareGPT write them (`turns.py`): a record per answer, or a question without one |
| `image`, or `images` with one entry | a path relative to the file |
| `answer`, `answers` | a text that is right; several (texts, or objects with `answer`), of which the first is the answer |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .reading.entries import fields, gather, items
from .reading.lines import checked_text, json_lines
from .reading.places import picture
from .reading.records import Problems, Record
from .reading.turns import pictures_of, turn_records
from .reading.unread import TURNS, Unread

PROMPTS = ("prompt", "question")
IMAGES = ("image", "images")
ANSWERS = ("answer", "answers")


def load_jsonl(path: Path, prompt: str, problems: Problems) -> list[Record]:
    """Records of the file (module docstring); `prompt` is for those that have none. Fields that nothing reads are told to
    `problems`, all together."""
    lines = ((f"{path}:{number}", (number, value)) for number, value in json_lines(path, problems))
    unread = Unread(path)

    def record(_: int, line: tuple[int, Any]) -> Iterator[Record]:
        number, value = line
        read = _read(fields(value))
        parts = {part for name, part in read.items() if value[name] not in ("", [])}
        asked = parts & {"prompt", "turns"} or prompt
        missing = [*([] if asked else ["prompt"]), *({"image", "answer"} - parts)]
        answered = "answers" in parts or "turns" in parts
        unread.see(value, read, [part for part in missing if not (part == "answer" and answered)])
        parts_of = {part: name for name, part in read.items()}
        yield from _records(value, parts_of, path, number, prompt, problems.inside)

    records = gather(lines, record, problems)
    unread.tell(problems)
    return records


def _read(value: Mapping[str, Any]) -> dict[str, str]:
    """The fields of an entry that are read → the part of a record that each is: of two that say the same the first."""

    def first(names: Sequence[str]) -> str | None:
        given = [name for name in names if value.get(name) is not None]
        return next((name for name in given if value[name] not in ("", [])), next(iter(given), None))

    turns = first(TURNS)
    named = {turns: "turns"} if turns else {first(PROMPTS): "prompt"}
    named |= {first(IMAGES): "image"} | {name: name for name in ANSWERS if value.get(name) not in (None, [])}
    return {name: part for name, part in named.items() if name is not None}


def _records(
    value: Mapping[str, Any],
    names: Mapping[str, str],
    path: Path,
    number: int,
    prompt: str,
    inside: Path | None,
) -> Iterator[Record]:
    """The records of one entry, of which `names` are the fields by part."""
    asked = names.get("prompt")
    for name in filter(None, (asked, names.get("answer"))):
        if not isinstance(value[name], str):
            raise ValueError(f"field {name!r} is {value[name]!r:.80}, not a string")
        checked_text(name, value[name])
    told = _answers(value, names)
    files = _files(value, names)
    if "turns" in names:
        turns = names["turns"]
        files = list(dict.fromkeys([*files, *pictures_of(value, turns)]))
    elif not (asked and value[asked]) and not files:
        raise ValueError(
            "the record has neither 'prompt' nor 'image' (nor 'question', 'messages' or 'conversations')"
        )
    if len(files) > 1:
        raise ValueError(f"the record has {len(files)} pictures, and one is read")
    image = picture(path.parent / files[0], inside) if files else None
    if "turns" not in names:
        yield _answered(Record(f"line-{number}", value[asked] if asked else prompt, image), told)
        return
    dialog = list(turn_records(f"line-{number}", value, image, names["turns"], unanswered=True))
    if told != (None, ()) and dialog[-1].answer is not None:
        raise ValueError(
            f"an answer stands beside {names['turns']!r}, which end with one; leave one of them out"
        )
    for one in dialog:
        yield one if one.answer is not None else _answered(one, told)


def _files(value: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Paths of pictures."""
    name = names.get("image")
    if name is None or value[name] in ("", []):
        return []
    paths = value[name] if name == "images" else [value[name]]
    if not isinstance(paths, list) or not all(isinstance(one, str) for one in paths):
        raise ValueError(
            f"field {name!r} is {value[name]!r:.80}, not a {'list of paths' if name == 'images' else 'string'}"
        )
    return [checked_text(name, one) for one in paths]


def _answers(value: Mapping[str, Any], names: Mapping[str, str]) -> tuple[str | None, tuple[str, ...]]:
    """The answer, and all that are right."""
    said: list[str] = []
    for one in items(value, "answers") if "answers" in names else ():
        text = one.get("answer") if isinstance(one, dict) else one
        if not isinstance(text, str):
            raise ValueError(f"field 'answers' holds {one!r:.80}, neither a text nor an object with 'answer'")
        said.append(checked_text("answers", text))
    answer = value["answer"] if "answer" in names else said[0] if said else None
    return answer, tuple(said) or ((answer,) if answer else ())


def _answered(record: Record, told: tuple[str | None, tuple[str, ...]]) -> Record:
    return replace(record, answer=told[0], references=told[1])
