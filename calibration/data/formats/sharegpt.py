"""ShareGPT conversations: a list of id and conversations, text alone (`ShareGPT_V3_unfiltered_cleaned_split.json`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....runtime.errors import OptionError
from ..arguments import Arguments
from ..entries import collect, fields, read_json
from ..records import Problems, Record
from ..turns import turn_records

USAGE = "CONVERSATIONS.json[,turns=first|all]"
TASK = None


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per answer, or per conversation with `turns=first`. Raises OptionError for a file of another layout."""
    path, turns = arguments.path(0), arguments.options.get("turns", "all")
    if turns not in ("first", "all"):
        raise OptionError(f"{arguments.form}: turns={turns!r:.40} is neither first nor all")
    document = read_json(path)
    if not isinstance(document, list):
        raise OptionError(f"{path} is not a list of conversations: not the layout of ShareGPT")

    def record(number: int, entry: Any) -> Iterator[Record]:
        found = list(turn_records(f"{number}-{fields(entry).get('id', '')}", entry, None))
        yield from found[:1] if turns == "first" else found

    return collect(path, "", document, record, problems)
