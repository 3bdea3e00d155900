"""VizWiz-VQA (Gurari et al., arXiv 1802.08218): `val.json`, a list of image, question and ten `answers` of answer and
answer_confidence. `unanswerable` is an answer like others, as in the official score. `test.json` has
image and question alone."""

from __future__ import annotations

from ..reading.arguments import Arguments
from ..reading.field_maps import FieldMap, load_mapped
from ..reading.records import Problems, Record

USAGE = "QUESTIONS.json,IMAGES"
TASK = "vqa"
MAP = FieldMap(prompt="question", key="image", image="image", answers="answers[].answer")


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per question; those of `test.json` have no answers."""
    return load_mapped(arguments, MAP, prompt, problems, unanswered=True)
