"""The cover of all pairs is one."""

from __future__ import annotations

import itertools

import pytest
from pairs import covering


@pytest.mark.parametrize("sizes", [(2, 2), (5, 4, 9), (5, 4, 10, 2), (16, 5, 4)])
def test_every_pair_of_values_stands_together(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    chosen = covering(axes)
    for one, other in itertools.combinations(range(len(axes)), 2):
        assert {(row[one], row[other]) for row in chosen} == set(itertools.product(axes[one], axes[other]))
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= 1.3 * largest[0] * largest[1]
