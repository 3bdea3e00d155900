"""All pairs of values, or each value, in every run; the whole product in `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
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

    return _fast(axes, list(filter(known, itertools.product(*values))), set(covering(values, known)))


def in_turn(
    there: Callable[[dict[str, Any]], bool] = lambda combination: True,
    /,
    turns: int = 1,
    **axes: Sequence[Any],
) -> pytest.MarkDecorator:
    """`in_pairs` for what takes long: each value of the first axis `turns` times in every run, with those of the others in
    turn. The distance between the turns of a value changes with every round, so that others meet, too."""
    product = [
        each for each in itertools.product(*axes.values()) if there(dict(zip(axes, each, strict=True)))
    ]
    kept = set()
    for turn, (_, own) in enumerate(itertools.groupby(product, key=lambda each: each[0])):
        cases = list(own)
        step = 1 + turn // len(cases) % max(1, len(cases) - 1)
        kept.update(cases[(turn + step * each) % len(cases)] for each in range(turns))
    return _fast(axes, product, kept)


def _fast(
    axes: Mapping[str, Sequence[Any]], product: Sequence[tuple[Any, ...]], kept: set[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    params = [pytest.param(*each, marks=() if each in kept else pytest.mark.slow) for each in product]
    return pytest.mark.parametrize(tuple(axes), params)
