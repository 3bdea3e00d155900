"""Share of answers that are one of the references, both as the VQA evaluation normalises a model's (`words.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from .told import Score, Told
from .words import normalised

RANKS = False


def score(told: Sequence[Told]) -> Score:
    """In per cent, over the records with references."""
    judged = [one for one in told if one.record.references]
    if not judged:
        return Score("exact", 0, len(told), left_out={"exact": "no record has answers"})
    right = sum(normalised(one.text) in map(normalised, one.record.references) for one in judged)
    return Score("exact", len(judged), len(told), {"exact": 100 * right / len(judged)})
