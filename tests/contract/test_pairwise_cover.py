"""The cover of all pairs is one, that of values, too; where each value has a turn, the others take theirs."""

from __future__ import annotations

import itertools

import pytest

from tests.support import pairs
from tests.support.pairs import covering, each_value, in_turn


@pytest.fixture(autouse=True)
def _whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "whole_product", True)


@pytest.mark.parametrize("sizes", [(2, 2), (5, 4, 9), (5, 4, 10, 2), (16, 5, 4)])
def test_every_pair_of_values_stands_together(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    chosen = covering(axes)
    for one, other in itertools.combinations(range(len(axes)), 2):
        assert {(row[one], row[other]) for row in chosen} == set(itertools.product(axes[one], axes[other]))
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= 1.3 * largest[0] * largest[1]


def test_every_first_value_has_a_turn_with_all_of_the_others() -> None:
    found = in_turn(lambda case: case["a"] != 1 or case["c"] == "y", a=range(8), b="uv", c="xy").args[1]
    fast = [case.values for case in found if not case.marks]
    assert [a for a, *_ in fast] == list(range(8)) and (1, "v", "y") in fast
    assert {tuple(rest) for _, *rest in fast} == set(itertools.product("uv", "xy"))
    assert len(found) == 8 * 4 - 2


def test_every_first_value_has_several_turns_in_changing_company() -> None:
    fast = [case.values for case in in_turn(turns=2, a=range(12), b="uvwx").args[1] if not case.marks]
    met = [frozenset(b for a, b in fast if a == one) for one in range(12)]
    assert {len(company) for company in met} == {2}
    assert set(met) == {frozenset(pair) for pair in itertools.combinations("uvwx", 2)}


def test_every_value_stands_once_and_every_group_together() -> None:
    axes = {"a": range(5), "b": "uvw", "c": "xy", "d": range(9)}
    cases = each_value(lambda case: case["a"] != 1 or case["c"] == "y", [("b", "c")], **axes).args[1]
    every_run = [case.values for case in cases if not case.marks]
    assert {(b, c) for _, b, c, _ in every_run} == set(itertools.product("uvw", "xy"))
    assert {a for a, *_ in every_run} == set(range(5)) and {d for *_, d in every_run} == set(range(9))
    assert len(every_run) == 9 and len(cases) == 5 * 3 * 2 * 9 - 3 * 9


def test_a_run_without_slow_tests_collects_the_same_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = in_turn(a=range(8), b="uvwx").args[1]
    monkeypatch.setattr(pairs, "whole_product", False)
    fast = in_turn(a=range(8), b="uvwx").args[1]
    assert fast == [case for case in whole if not case.marks] and len(fast) < len(whole)
