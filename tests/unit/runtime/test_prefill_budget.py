"""How many parts of prompts come between two cycles."""

from __future__ import annotations

import pytest
from vlmexport.runtime.serving.prefill_budget import PrefillBudget


def parts(budget: PrefillBudget, sorts: list[tuple[str, float]]) -> list[str]:
    """The sorts of parts, of these seconds, that come before the next cycle."""
    done = []
    for sort, seconds in sorts:
        if not budget.allows(sort):
            break
        budget.count(sort, seconds)
        done.append(sort)
    return done


@pytest.mark.parametrize(
    ("beginning", "running", "most"), [(1, 15, 1), (4, 12, 1), (6, 10, 2), (13, 3, 17), (16, 0, 64)]
)
def test_a_batch_that_is_full_stands_still_for_one_part(beginning: int, running: int, most: int) -> None:
    budget = PrefillBudget(1)
    budget.begin(beginning, running)
    assert len(parts(budget, [("chunk", 1.0)] * 100)) == most


def test_short_parts_come_together_as_long_as_they_take_no_more_than_the_longest() -> None:
    budget = PrefillBudget(1)
    whole = [("picture", 5.0), ("encoder", 1.0), ("chunk", 1.0)]
    budget.begin(1, 0)
    assert len(parts(budget, whole)) == 3
    budget.begin(1, 15)
    assert parts(budget, whole) == ["picture"]  # the encoder would make the gap longer than the longest part
    budget.begin(1, 15)
    assert parts(budget, [*whole[1:], *whole]) == ["encoder", "chunk"]  # and a picture behind them would


def test_more_prefills_per_cycle_allow_more_parts() -> None:
    budget = PrefillBudget(3)
    budget.begin(1, 15)
    assert len(parts(budget, [("chunk", 1.0)] * 100)) == 3
