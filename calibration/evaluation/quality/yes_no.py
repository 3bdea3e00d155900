"""MME's score (Fu et al., arXiv 2306.13394): accuracy over questions, and accuracy+ over pictures whose two questions are
both right; a category's score is the sum of both in per cent, at most 200. Papers print its sum over the categories of
perception (at most 2000) and over those of cognition (800)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from .told import Score, Told

RANKS = False

GROUPS = {
    "perception": (
        "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR",
    ),
    "cognition": ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning"),
}  # fmt: skip


def verdict(answer: str) -> str:
    """What the official code takes an answer for: `yes`, then `no`, within its first four characters; else `other`."""
    begin = answer.strip().lower()[:4]
    return next((word for word in ("yes", "no") if word in begin), "other")


def score(told: Sequence[Told]) -> Score:
    """Keys of records are CATEGORY/PICTURE/N."""
    pictures: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    judged = [one for one in told if one.record.references]
    for one in judged:
        category, _, rest = one.record.key.rpartition("/")[0].rpartition("/")
        pictures[category][rest].append(verdict(one.text) == one.record.references[0].lower())
    if not judged:
        return Score("yes-no", 0, len(told), left_out={"accuracy": "no record has an answer"})
    values, both, right, total = {}, [], [], 0.0
    for category, answers in pictures.items():
        questions = [hit for hits in answers.values() for hit in hits]
        pairs = [all(hits) for hits in answers.values()]
        values[category] = 100 * (sum(questions) / len(questions) + sum(pairs) / len(pairs))
        total += values[category]
        both += pairs
        right += questions
    head = {
        "total": total,
        "accuracy": 100 * sum(right) / len(right),
        "accuracy+": 100 * sum(both) / len(both),
    }
    sums, notes = _sums(values)
    return Score("yes-no", len(judged), len(told), {**sums, **head, **values}, notes=notes)


def _sums(values: Mapping[str, float]) -> tuple[dict[str, float], tuple[str, ...]]:
    """The sums that papers print, and which of them lack categories."""
    sums, notes = {}, []
    for group, categories in GROUPS.items():
        present = [values[category] for category in categories if category in values]
        if present:
            sums[group] = sum(present)
        if 0 < len(present) < len(categories):
            notes.append(f"{group} is the sum of {len(present)} of its {len(categories)} categories")
    return sums, tuple(notes)
