"""A set that Hugging Face's `datasets` opens, by hub id or folder, and a map of its columns (`field_maps.py`).

`hf:lmms-lab/textvqa,split=validation,prompt=question,image=image,answers=answers` · `conversations=COLUMN` reads turns.
`split` may be a slice, `validation[:100]`; no other split is downloaded. Of a column of lists of pictures the only one is
taken; a row with several is a bad one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....runtime.common.errors import OptionError
from ....runtime.common.paths import is_folder
from ..reading.arguments import Arguments
from ..reading.entries import gather
from ..reading.field_maps import NAMES, FieldMap, mapped
from ..reading.hub_rows import open_rows
from ..reading.places import check_row
from ..reading.records import ImageRef, Problems, Record
from ..reading.turns import turn_records

_MAPPED = [name for name in NAMES if name not in ("rows", "video")]
USAGE = "ID|FOLDER[,config=NAME][,split=NAME][,conversations=COLUMN]" + "".join(
    f"[,{name}=COLUMN]" for name in _MAPPED
)
TASK = None


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per row, or per answer of its conversation; of the split `train` unless another is named.

    Raises OptionError where the set cannot be opened, has not the columns, or nothing says what is asked.
    """
    source, options = arguments.places[0], arguments.options
    source = str(Path(source).resolve()) if is_folder(Path(source)) else source
    config, split = options.get("config", ""), options.get("split", "train")
    talk = options.get("conversations")
    field_map = FieldMap.of({name: value for name, value in options.items() if name in _MAPPED})
    if not (talk or field_map.prompt or field_map.image):
        raise OptionError("hf: nothing says what is asked; give prompt=, image= or conversations=COLUMN")
    rows = open_rows(source, config, split)
    column = field_map.image
    for name in filter(None, (talk, column)):
        if name not in rows.names:
            raise OptionError(f"hf:{source} has no column {name!r:.60}; it has {', '.join(rows.names)}")
    if column is not None and column not in rows.pictures:
        raise OptionError(
            f"hf:{source}: the column {column!r} holds no pictures; cast it to datasets.Image()"
        )

    def record(number: int, row: Any) -> Iterator[Record]:
        stored = rows.picture(number, column) if column else None
        image = None
        if column and stored:
            place = (source, config, split, number, column)
            check_row(place, problems.inside)
            image = ImageRef(row=place)
        if talk:
            yield from turn_records(str(number), {"conversations": row.get(talk)}, image)
        else:
            one = mapped(replace(field_map, image=None), number, row, Path(), prompt, None)
            yield replace(one, image=image)

    return gather(((f"hf:{source}[{split}]: row {n}", row) for n, row in enumerate(rows)), record, problems)
