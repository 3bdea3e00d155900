"""MM-Vet (Yu et al., arXiv 2308.02490): `mm-vet.json`, an object of imagename, question, answer, capability.

Its score asks GPT-4, which nothing here does; `<OR>` in an answer parts what would also be right.
"""

from __future__ import annotations

from dataclasses import replace

from ..arguments import Arguments
from ..field_maps import FieldMap, load_mapped
from ..records import Problems, Record

USAGE = "MM-VET.json,IMAGES"
TASK = None
MAP = FieldMap(prompt="question", image="imagename", answer="answer")


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per question."""
    records = load_mapped(arguments, MAP, prompt, problems)
    return [replace(one, references=tuple((one.answer or "").split("<OR>"))) for one in records]
