"""SEED-Bench (Li et al., arXiv 2307.16125): `SEED-Bench.json`, `questions` with question, choice_a … choice_d, answer (a
letter), data_id and data_type (image or video). Pictures and videos are files named data_id.

Dimensions 11 and 12 ask about a `segment` of a film: `[648.0, 658.0]` are seconds (Epic-Kitchens), `[18, 166]` frames
(Breakfast). Such a question needs frames=N: whole films are read without a beginning and an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ....runtime.common.errors import OptionError
from ..reading.arguments import Arguments
from ..reading.entries import collect, listed
from ..reading.field_maps import FieldMap, mapped, value_at
from ..reading.files import read_json
from ..reading.records import Problems, Record, read_segment

USAGE = "SEED-BENCH.json,FOLDER[,TYPE][,frames=N]"
TASK = "choices"
_CHOICES = "choice_a|choice_b|choice_c|choice_d"
MAPS = {
    kind: FieldMap(
        prompt="question", key="question_id", choices=_CHOICES, choice="answer", **{kind: "data_id"}
    )
    for kind in ("image", "video")
}


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per question, of both types or of TYPE. Raises OptionError for an unknown type."""
    path, folder, wanted = arguments.path(0), arguments.path(1), arguments.place(2)
    frames = arguments.count("frames")
    if wanted is not None and wanted not in MAPS:
        raise OptionError(f"seed: unknown type {wanted!r:.40}; choose one of {', '.join(MAPS)}")

    def record(number: int, row: Any) -> Iterator[Record]:
        kind = value_at(row, "data_type")
        if not isinstance(kind, str) or kind not in MAPS:
            raise ValueError(f"field 'data_type' is {kind!r:.40}, neither image nor video")
        if wanted in (None, kind):
            yield _of_segment(mapped(MAPS[kind], number, row, folder, prompt, problems.inside, frames), row)

    return collect(
        path, "questions", listed(read_json(path), path, "questions", "SEED-Bench"), record, problems
    )


def _of_segment(record: Record, row: Any) -> Record:
    """The record with its film cut to the row's segment, where it has one. ValueError for another layout, and without a number of
    frames."""
    part = row.get("segment")
    if part is None or record.image is None or record.image.video is None:
        return record
    return replace(record, image=replace(record.image, segment=read_segment(part)))
