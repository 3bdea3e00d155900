"""Ranking of given answers: VisDial's MRR, R@k and mean rank (Das et al., arXiv 1611.08669). Of questions with a few
choices R@1 is the accuracy. The target ranks by log p(choice | picture, turns), the end of the answer included."""

from __future__ import annotations

from collections.abc import Sequence

from .told import Score, Told

RANKS = True
_PLACES = (1, 5, 10)


def score(told: Sequence[Told]) -> Score:
    """R@k in per cent and the mean rank, over the records that were ranked."""
    ranks = [one.rank for one in told if one.rank is not None]
    if not ranks:
        return Score("choices", 0, len(told), left_out={"MRR": "no record has choices of which one is right"})
    values = {"MRR": sum(1 / rank for rank in ranks) / len(ranks)}
    values |= {f"R@{k}": 100 * sum(rank <= k for rank in ranks) / len(ranks) for k in _PLACES}
    values["mean rank"] = sum(ranks) / len(ranks)
    return Score("choices", len(ranks), len(told), values)
