"""Rows of any table as records, by a map of what stands where.

| field of the map | value |
|---|---|
| `prompt`, `key`, `image`, `video` | a text with fields in braces, `{question}`, `{image_id}.jpg`; a bare name is that field; `{#}` is the row's own key in an object of rows, or its number |
| `answer`, `answers`, `choices` | a path: `answer`, `answers[].answer` (of every entry), `choice_a\\|choice_b` (these fields) |
| `choice` | a path to the right one of `choices`: its number from 0, its letter (A, B …), or its text |
| `rows` | where in a JSON document the rows are: a path, or nothing for the document itself |
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ....runtime.common.bounded_files import opened
from ....runtime.common.errors import OptionError
from ....runtime.common.paths import path_text
from .arguments import Arguments
from .entries import fields, gather, inside
from .files import read_json
from .lines import MARKED, checked_text, json_lines
from .places import picture, video_file
from .records import ImageRef, Problems, Record

LARGEST_ROW = 64 << 20
"""Characters of a row of a table, and of each of its values: pictures in base64, as some tables hold."""
LEAF = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class FieldMap:
    """See the module. `answer` alone is the only reference, else `answers` are; the first of them is the answer."""

    prompt: str = ""
    rows: str = ""
    key: str = "{#}"
    image: str | None = None
    video: str | None = None
    answer: str | None = None
    answers: str | None = None
    choices: str | None = None
    choice: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> FieldMap:
        """A user's own map."""
        return replace(cls(), **dict(options))

    def of_row(self, row: Any) -> FieldMap:
        """The map, without its answers where the row has not their field: test splits are published so."""
        name = (self.answer or self.answers or "").partition("[]")[0]
        return self if name in fields(row) else replace(self, answer=None, answers=None)


NAMES = tuple(FieldMap.__dataclass_fields__)
"""Names of options that make a map."""


def load_mapped(
    arguments: Arguments,
    field_map: FieldMap,
    prompt: str,
    problems: Problems,
    wanted: Callable[[Any, dict[str, Any]], bool] = lambda key, row: True,
    unanswered: bool = False,
) -> list[Record]:
    """Records of the table at the first place, with pictures and videos in the folder at the second: of rows that are
    `wanted` (by key and row). Rows may lack answers where they may be `unanswered`.

    Raises OptionError for a file that cannot be read, and for rows that are not where the map says.
    """
    path = arguments.path(0)
    folder = Path(arguments.place(1) or path.parent)
    frames = arguments.count("frames")

    def record(number: int, entry: tuple[Any, Any]) -> Iterator[Record]:
        key, row = entry
        if wanted(key, fields(row)):
            yield mapped(
                field_map.of_row(row) if unanswered else field_map,
                key,
                row,
                folder,
                prompt,
                problems.inside,
                frames,
            )

    return gather(table_rows(path, field_map.rows, problems), record, problems)


def mapped(
    field_map: FieldMap,
    key: Any,
    row: Any,
    folder: Path,
    prompt: str,
    inside: Path | None,
    frames: int | None = None,
) -> Record:
    """One row as a record, its picture `inside` of a folder (`places.py`); ValueError naming the field that is missing or of
    another type."""
    fields(row)
    answers = tuple(_told(row, field_map.answers)) if field_map.answers else ()
    if field_map.answer and (value := value_at(row, field_map.answer)) is not None:
        answer = _plain(value, field_map.answer)
        answers = answers or (answer,)
    else:
        answer = answers[0] if answers else None
    choices = tuple(_told(row, field_map.choices)) if field_map.choices else ()
    choice = _chosen(row, field_map.choice, choices) if field_map.choice and choices else None
    if choice is not None and answer is None:
        answer = choices[choice]
    return Record(
        filled(field_map.key, key, row), filled(field_map.prompt, key, row) if field_map.prompt else prompt,
        _seen(field_map, key, row, folder, inside, frames), answer,
        references=answers or ((answer,) if answer else ()), choices=choices, choice=choice,
    )  # fmt: skip


def filled(template: str, key: Any, row: Any) -> str:
    """A template with the row's values; ValueError for a field that the row has not."""
    if not LEAF.search(template):
        template = f"{{{template}}}"

    def value(match: re.Match[str]) -> str:
        if match[1] == "#":
            return str(key)
        return "" if (one := value_at(row, match[1])) is None else _plain(one, match[1])

    return checked_text(template, LEAF.sub(value, template).strip())


def value_at(row: Any, path: str) -> Any:
    """The value at a path with points; ValueError where there is none. None where it is null."""
    value = row
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            have = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"no field {path!r:.60}; it has {have:.200}")
        value = value[part]
    return value


def table_rows(path: Path, rows: str, problems: Problems) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(place, (key, row)) of a table: `.jsonl`, `.csv` and `.tsv` by line, JSON by entry or key.

    Raises OptionError where the file cannot be read, or `rows` are neither a list nor an object.
    """
    if path.suffix == ".jsonl":
        for number, value in json_lines(path, problems):
            yield f"{path}:{number}", (number, value)
        return
    if path.suffix in (".csv", ".tsv"):
        yield from _separated(path, "\t" if path.suffix == ".tsv" else ",", problems)
        return
    table = inside(read_json(path), rows)
    if isinstance(table, list):
        yield from ((f"{path}: {rows}[{number}]", (number, row)) for number, row in enumerate(table))
    elif isinstance(table, dict):
        yield from ((f"{path}: {rows}[{key!r:.80}]", (key, row)) for key, row in table.items())
    else:
        raise OptionError(
            f"{path} has no rows {f'at {rows!r}' if rows else 'at its top'}: give a list or an object"
        )


def _separated(path: Path, mark: str, problems: Problems) -> Iterator[tuple[str, tuple[Any, Any]]]:
    csv.field_size_limit(LARGEST_ROW)
    try:
        with opened(path, OptionError, pipes=True) as file:
            lines = Row(io.TextIOWrapper(file, MARKED, newline=""))
            table = csv.DictReader(lines, delimiter=mark)
            for number, row in enumerate(table, 1):
                lines.characters = 0
                where, beyond = f"{path}:{table.line_num}", row.pop(None, None)  # type: ignore[call-overload]
                if any(beyond or ()):  # separators at a line's end are no values
                    problems.report(
                        where,
                        f"{len(beyond)} value(s) more than the header has names; quote texts that hold {mark!r}",
                    )
                    continue
                yield where, (number, row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise OptionError(f"{path_text(path)} is no table: {error}") from error


class Row:
    """The lines of a table, of which those of one row are bounded: quoted values go over lines."""

    def __init__(self, lines: TextIO) -> None:
        self._lines, self.characters = lines, 0

    def __iter__(self) -> Iterator[str]:
        while line := self._lines.readline(LARGEST_ROW + 1):
            self.characters += len(line)
            if self.characters > LARGEST_ROW:
                raise csv.Error(f"a row has more than {LARGEST_ROW >> 20} MiB")
            yield line


def _seen(
    field_map: FieldMap, key: Any, row: Any, folder: Path, inside: Path | None, frames: int | None
) -> ImageRef | None:
    if field_map.video:
        return video_file(folder / filled(field_map.video, key, row), frames, inside)
    if not field_map.image:
        return None
    # A row without a picture has null in its field; a template around it would name a file all the same.
    used = LEAF.findall(field_map.image) or [field_map.image]
    if any(name != "#" and value_at(row, name) in (None, "") for name in used):
        return None
    return picture(folder / filled(field_map.image, key, row), inside)


def _told(row: Any, path: str) -> Iterator[str]:
    """The texts at a path (module docstring)."""
    if "|" in path:
        yield from (
            _plain(value_at(row, name), name) for name in path.split("|") if value_at(row, name) is not None
        )
        return
    head, each, inner = path.partition("[]")
    value = value_at(row, head)
    if isinstance(value, str) and not each:
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {head!r} is {value!r:.80}, not a list with something in it")
    for one in value:
        yield _plain(value_at(one, inner.removeprefix(".")) if inner else one, path)


def _plain(value: Any, name: str) -> str:
    """A text, or a number as text; ValueError for anything else, and for a blank one."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"field {name!r} is {value!r:.80}, not a text")
    return checked_text(name, str(value).strip())


def _chosen(row: Any, path: str, choices: tuple[str, ...]) -> int | None:
    value = said = value_at(row, path)
    if value is None:
        return None
    if isinstance(value, str) and value in choices:
        return choices.index(value)
    if isinstance(value, str) and len(value) == 1 and value.isalpha():
        value = ord(value.upper()) - ord("A")
    elif isinstance(value, str) and value.isdecimal():
        value = int(value)
    if type(value) is not int or not 0 <= value < len(choices):
        raise ValueError(f"field {path!r} is {said!r:.80}, none of the {len(choices)} choices")
    return value
