"""MME's score (Fu et al., arXiv 2306.13394): accuracy over questions, and accuracy+ over pictures whose two questions are
both right; a category's score is the sum of both in per cent, the total their sum over categories (at most 200 each)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .told import Score, Told
from .words import normalised

RANKS = False


def score(told: Sequence[Told]) -> Score:
    """Keys of records are CATEGORY/PICTURE/N; an answer is what its first word says."""
    pictures: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    judged = [one for one in told if one.record.references]
    for one in judged:
        category, _, rest = one.record.key.rpartition("/")[0].rpartition("/")
        said = normalised(one.text).split()
        pictures[category][rest].append(said[:1] == [one.record.references[0].lower()])
    if not judged:
        return Score("yes-no", 0, len(told), left_out={"accuracy": "no record has an answer"})
    values, both, right, total = {}, [], [], 0.0
    for category, found in pictures.items():
        questions = [hit for hits in found.values() for hit in hits]
        pairs = [all(hits) for hits in found.values()]
        values[category] = 100 * (sum(questions) / len(questions) + sum(pairs) / len(pairs))
        total += values[category]
        both += pairs
        right += questions
    head = {
        "total": total,
        "accuracy": 100 * sum(right) / len(right),
        "accuracy+": 100 * sum(both) / len(both),
    }
    return Score("yes-no", len(judged), len(told), {**head, **values})
