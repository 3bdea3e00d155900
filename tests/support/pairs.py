"""All pairs of values, or each value, in every run; the whole product in `make test-all`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

whole_product = True
"""False in a run that would only deselect the rest of every product: then it is not even collected."""

Case = dict[str, Any]


def anything(case: Case) -> bool:
    """Every combination is there."""
    return True


def covering(
    axes: Sequence[Sequence[Any]],
    there: Callable[[tuple[Any, ...]], bool] = lambda combination: True,
    groups: Sequence[tuple[int, ...]] | None = None,
) -> list[tuple[Any, ...]]:
    """Few combinations in which all values of the axes of a group stand together, as far as `there` are any; without
    `groups`, those of every pair of axes. Greedy, the same every time; values take turns where several would do."""
    groups = list(itertools.combinations(range(len(axes)), 2)) if groups is None else groups
    candidates = {
        each: {(group, *(each[axis] for axis in group)) for group in groups}
        for each in itertools.product(*axes)
        if there(each)
    }
    left = set().union(*candidates.values())
    used: Counter[tuple[int, Any]] = Counter()
    chosen: list[tuple[Any, ...]] = []
    while left:
        new = {each: len(parts & left) for each, parts in candidates.items()}
        most = max(new.values())
        best = min(
            (each for each, count in new.items() if count == most),
            key=lambda each: sum(used[place] for place in enumerate(each)),
        )
        chosen.append(best)
        left -= candidates.pop(best)
        used.update(enumerate(best))
        candidates = {each: parts for each, parts in candidates.items() if parts & left}
    return chosen


def in_pairs(there: Callable[[Case], bool] = anything, /, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """`parametrize` over the product of the axes, as far as `there` is a combination; those that add no new pair are
    marked `slow`."""
    return _covered(there, axes, None)


def each_value(
    there: Callable[[Case], bool] = anything,
    /,
    groups: Sequence[tuple[str, ...]] = (),
    **axes: Sequence[Any],
) -> pytest.MarkDecorator:
    """`in_pairs` for what planted errors do not need: in every run each value of each axis, and each combination of the
    axes of a group."""
    places = {name: place for place, name in enumerate(axes)}
    combined = [tuple(places[name] for name in names) for names in groups]
    return _covered(there, axes, [*combined, *((place,) for place in places.values())])


def in_turn(
    there: Callable[[Case], bool] = anything,
    /,
    turns: int = 1,
    **axes: Sequence[Any],
) -> pytest.MarkDecorator:
    """`in_pairs` for what takes long: each value of the first axis `turns` times in every run, with those of the others in
    turn. The distance between the turns of a value changes with every round, so that others meet, too."""
    product = _product(there, axes)
    kept = set()
    for turn, (_, own) in enumerate(itertools.groupby(product, key=lambda each: each[0])):
        cases = list(own)
        step = 1 + turn // len(cases) % max(1, len(cases) - 1)
        kept.update(cases[(turn + step * each) % len(cases)] for each in range(turns))
    return fast(tuple(axes), product, kept)


def fast(
    names: Sequence[str], product: Sequence[tuple[Any, ...]], kept: set[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    """`parametrize` over the product; what is not `kept` is slow."""
    params = [
        pytest.param(*each, marks=() if each in kept else pytest.mark.slow)
        for each in product
        if whole_product or each in kept
    ]
    return pytest.mark.parametrize(tuple(names), params)


def _product(there: Callable[[Case], bool], axes: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    return [each for each in itertools.product(*axes.values()) if there(dict(zip(axes, each, strict=True)))]


def _covered(
    there: Callable[[Case], bool],
    axes: Mapping[str, Sequence[Any]],
    groups: Sequence[tuple[int, ...]] | None,
) -> pytest.MarkDecorator:
    product = _product(there, axes)
    known = set(product)
    kept = set(covering([list(axis) for axis in axes.values()], known.__contains__, groups))
    return fast(tuple(axes), product, kept)
