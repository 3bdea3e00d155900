"""MM-Vet (Yu et al., arXiv 2308.02490): `mm-vet.json`, an object of imagename, question, answer, capability.

Its score asks GPT-4, which nothing here does; `<OR>` in an answer parts what would also be right, `<AND>` what has to
be said together.
"""

from __future__ import annotations

from dataclasses import replace

from ..reading.arguments import Arguments
from ..reading.field_maps import FieldMap, load_mapped
from ..reading.records import Problems, Record

USAGE = "MM-VET.json,IMAGES"
TASK = None
MAP = FieldMap(prompt="question", image="imagename", answer="answer")


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per question; its answer is the first of those that are right, its references are all of them."""
    return [_parted(one) for one in load_mapped(arguments, MAP, prompt, problems)]


def _parted(record: Record) -> Record:
    """The record with its answer as one would say it: `1<AND>2<OR>12` is `1, 2` or `12`."""
    parts = ((part.strip() for part in one.split("<AND>")) for one in (record.answer or "").split("<OR>"))
    right = tuple(filter(None, (", ".join(filter(None, together)) for together in parts)))
    return replace(record, answer=right[0] if right else None, references=right)
