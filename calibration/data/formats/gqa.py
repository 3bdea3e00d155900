"""GQA (Hudson and Manning, arXiv 1902.09506): `val_balanced_questions.json`, an object of imageId, question, answer.

`submission_all_questions.json`, the test and challenge splits have no answers."""

from __future__ import annotations

from ..reading.arguments import Arguments
from ..reading.field_maps import FieldMap, load_mapped
from ..reading.records import Problems, Record

USAGE = "QUESTIONS.json,IMAGES"
TASK = "exact"
MAP = FieldMap(prompt="question", image="{imageId}.jpg", answer="answer")


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per question; those of a test split have no answers."""
    return load_mapped(arguments, MAP, prompt, problems, unanswered=True)
