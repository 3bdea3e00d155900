"""TextVQA (Singh et al., arXiv 1904.08920): `TextVQA_0.5.1_val.json`, `data` with question_id, image_id, question and,
of train and val, ten answers. Pictures are `IMAGE_ID.jpg`. ST-VQA-like files of this layout work as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..reading.arguments import Arguments
from ..reading.entries import collect, listed
from ..reading.field_maps import FieldMap, mapped
from ..reading.files import read_json
from ..reading.records import Problems, Record

USAGE = "QUESTIONS.json,IMAGES"
TASK = "vqa"
MAP = FieldMap(prompt="question", key="question_id", image="{image_id}.jpg", answers="answers")


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per question; those of `test` have no answers."""
    path, folder = arguments.path(0), arguments.path(1)

    def record(number: int, row: Any) -> Iterator[Record]:
        yield mapped(MAP.of_row(row), number, row, folder, prompt, problems.inside)

    return collect(path, "data", listed(read_json(path), path, "data", "TextVQA"), record, problems)
