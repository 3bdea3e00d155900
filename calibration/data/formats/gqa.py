"""GQA (Hudson and Manning, arXiv 1902.09506): `val_balanced_questions.json`, an object of imageId, question, answer."""

from __future__ import annotations

from ..arguments import Arguments
from ..field_maps import FieldMap, load_mapped
from ..records import Problems, Record

USAGE = "QUESTIONS.json,IMAGES"
TASK = "exact"
MAP = FieldMap(prompt="question", image="{imageId}.jpg", answer="answer")


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per question."""
    return load_mapped(arguments, MAP, prompt, problems)
