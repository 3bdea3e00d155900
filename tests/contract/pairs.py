"""All pairs of values in every run, the whole product in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Few combinations in which every pair of values of two axes stands together; greedy, the same every time."""
    left = {
        (one, a, other, b)
        for one, other in itertools.combinations(range(len(axes)), 2)
        for a in axes[one]
        for b in axes[other]
    }
    chosen: list[tuple[Any, ...]] = []
    candidates = list(itertools.product(*axes))
    while left:
        best, found = candidates[0], set()
        for candidate in candidates:
            pairs = {
                (one, candidate[one], other, candidate[other])
                for one, other in itertools.combinations(range(len(axes)), 2)
            } & left
            if len(pairs) > len(found):
                best, found = candidate, pairs
                if len(found) == len(axes) * (len(axes) - 1) // 2:
                    break
        chosen.append(best)
        left -= found
    return chosen


def in_pairs(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """`parametrize` over the product of the axes; combinations that add no new pair are marked `slow`."""
    values = [list(axis) for axis in axes.values()]
    kept = set(covering(values))
    params = [
        pytest.param(*each, marks=() if each in kept else pytest.mark.slow)
        for each in itertools.product(*values)
    ]
    return pytest.mark.parametrize(tuple(axes), params)
