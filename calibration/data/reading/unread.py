"""Fields of people's own data that nothing reads: they are said, and where they look like what is missing, how to name them."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .records import Problems

NAMES = ("id", "idx", "key", "uid", "question_id")
"""Names that people give to records: no score and no training reads them."""

TURNS = ("messages", "conversations")
"""Fields that hold turns; the fields of a turn are looked at, too."""
OF_A_TURN = ("from", "value", "role", "content")

WORDS = {
    "prompt": ("query", "instruction", "input", "inputs", "text", "user", "human", "problem", "task", "q"),
    "image": ("img", "picture", "photo", "file", "file_name", "filename", "image_path", "image_file", "img_path", "path"),
    "answer": (
        "response", "output", "outputs", "label", "caption", "target", "completion", "ground_truth", "gt", "solution", "a",
    ),
}  # fmt: skip
"""What others call a record's parts."""

_SHOWN = 8


class Unread:
    """Counts, over the records of one file, the fields that nothing reads, and the parts of a record that are missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fields: Counter[str] = Counter()
        self._missing: Counter[str] = Counter()
        self._read: dict[str, str] = {}
        self._count = 0

    def see(self, entry: Mapping[str, Any], read: Mapping[str, str], missing: Collection[str] = ()) -> None:
        """One record: the fields that are `read` (field → part of a record, a name of `WORDS` where it is one), and the parts
        that are `missing` of it. A field that holds nothing is no loss."""
        self._count += 1
        self._missing.update(missing)
        self._read |= {part: field for field, part in read.items()}
        for name, value in entry.items():
            if name in read:
                if name in TURNS and isinstance(value, list):
                    turns = (turn for turn in value if isinstance(turn, dict))
                    fields = {
                        f"{name}[].{field}" for turn in turns for field in turn if field not in OF_A_TURN
                    }
                    self._fields.update(fields)
            elif name not in NAMES and value not in (None, "", [], {}):
                self._fields[name] += 1

    def tell(self, problems: Problems) -> None:
        """Says what was not read, if anything. Raises InputError where `problems` are strict."""
        if said := self.line():
            problems.tell(said)

    def line(self) -> str | None:
        """One line that names them all, most frequent first; None where everything is read."""
        if not self._fields:
            return None
        names = [_quoted(name, count, self._count) for name, count in self._fields.most_common(_SHOWN)]
        more = f" and {len(self._fields) - _SHOWN} more" if len(self._fields) > _SHOWN else ""
        several = len(self._fields) > 1
        said = f"{self._path}: field{'s' * several} {', '.join(names)}{more} {'are' if several else 'is'} not read"
        lacks = [part for part in WORDS if part in self._missing]
        guessed = {part: field for part in lacks if (field := self._guess(part)) is not None}
        if not guessed:
            return said
        lacking = ", ".join(f"{self._missing[part]} records have no {part}" for part in guessed)
        places = {part: self._read[part] for part in self._read if part in (*WORDS, "answers")} | guessed
        given = ",".join(f"{part}={places[part]}" for part in sorted(places, key=_place))
        return f"{said} ({lacking}); did you mean --data fields:{self._path},{given}?"

    def _guess(self, part: str) -> str | None:
        """The unread field that may be this part of a record."""
        words = (part, *WORDS.get(part, ()))
        named = [name for name in self._fields if name.lower() in words]
        return next(iter(named or difflib.get_close_matches(part, self._fields, 1, 0.75)), None)


def _place(part: str) -> int:
    return [*WORDS, "answers"].index(part)


def _quoted(name: str, count: int, total: int) -> str:
    return f"`{name:.40}`" + ("" if count == total else f" ({count} of {total} records)")
