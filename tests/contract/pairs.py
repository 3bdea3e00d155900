"""All pairs of values in every run, the whole product in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def covering(
    axes: Sequence[Sequence[Any]], there: Callable[[tuple[Any, ...]], bool] = lambda combination: True
) -> list[tuple[Any, ...]]:
    """Few combinations in which every pair of values of two axes stands together, as far as `there` are any; greedy, the
    same every time."""
    candidates = list(filter(there, itertools.product(*axes)))
    left = {
        (one, a, other, b)
        for candidate in candidates
        for one, other in itertools.combinations(range(len(axes)), 2)
        for a, b in [(candidate[one], candidate[other])]
    }
    chosen: list[tuple[Any, ...]] = []
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


def in_pairs(
    there: Callable[[dict[str, Any]], bool] = lambda combination: True, /, **axes: Sequence[Any]
) -> pytest.MarkDecorator:
    """`parametrize` over the product of the axes, as far as `there` is a combination; those that add no new pair are
    marked `slow`."""
    values = [list(axis) for axis in axes.values()]

    def known(each: tuple[Any, ...]) -> bool:
        return there(dict(zip(axes, each, strict=True)))

    kept = set(covering(values, known))
    params = [
        pytest.param(*each, marks=() if each in kept else pytest.mark.slow)
        for each in filter(known, itertools.product(*values))
    ]
    return pytest.mark.parametrize(tuple(axes), params)
