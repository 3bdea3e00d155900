"""VQA accuracy: the official formula over ten people's answers (Antol et al., arXiv 1505.00468).

An answer that k of the other nine gave counts min(k/3, 1), averaged over leaving out each of the ten. As in the official code
(vqaEval.py of GT-Vision-Lab/VQA) the model's answer is normalised in full, people's by their punctuation alone, and not
at all where all ten are equal: those of VQA are stored as they are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from .told import Score, Told
from .words import normalised, punctuated

RANKS = False


def accuracy(answer: str, people: Sequence[str]) -> float:
    """Of one answer, 0 … 1."""
    said = normalised(answer)
    given = list(people) if len(set(people)) == 1 else [punctuated(one) for one in people]
    equal = given.count(said)
    return sum(min(1.0, (equal - (one == said)) / 3) for one in given) / len(given)


def score(told: Sequence[Told]) -> Score:
    """In per cent, as it is published, over the records that people have answered."""
    judged = [one for one in told if one.record.references]
    notes = []
    if fewer := sum(len(one.record.references) != 10 for one in judged):
        notes.append(f"{fewer} question(s) have another number of answers than ten")
    if not judged:
        return Score("vqa", 0, len(told), left_out={"VQA accuracy": "no record has answers"})
    mean = sum(accuracy(one.text, one.record.references) for one in judged) / len(judged)
    return Score("vqa", len(judged), len(told), {"VQA accuracy": 100 * mean}, notes=tuple(notes))
