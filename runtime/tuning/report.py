"""What a report of `tune` says of each way of drafting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from ..speedup.budget import Budget
from ..speedup.predict import Prediction
from .ab_runs import Arm, by_request, speedup, tokens_per_cycle
from .bootstrap import interval

WIDE = 0.1
"""Width of a prediction's 95 % interval, as a share of it, from which it is called uncertain."""


def measured_prediction(arm: Arm) -> Prediction:
    """A draft as the requests show it that it was not chosen by."""
    turns = arm.halves[1]
    assert arm.draft is not None and arm.budget is not None, "plain decoding is not looked at"
    value, tokens = speedup(turns), tokens_per_cycle(turns)
    sure = interval(lambda drawn: speedup(list(chain.from_iterable(drawn))), by_request(turns))
    return Prediction(arm.draft, arm.budget, value, tokens, tokens / value, sure)


def is_uncertain(chosen: Prediction) -> bool:
    """Whether the interval of a prediction is wide, or not known."""
    if chosen.interval is None:
        return True
    low, high = chosen.interval
    return high - low > WIDE * chosen.speedup


def reported_predictions(
    predictions: Sequence[Prediction], looks: Mapping[tuple[str | None, Budget | None], Arm]
) -> list[Prediction]:
    """Of every draft its fastest chain, every tree, and what was looked at; `predictions` is fastest first."""
    chains: set[str] = set()
    best = []
    for entry in predictions:
        if entry.budget.nodes == entry.budget.depth:
            if entry.draft in chains and (entry.draft, entry.budget) not in looks:
                continue
            chains.add(entry.draft)
        best.append(entry)
    return best


def prediction_row(entry: Prediction, looked: Arm | None) -> dict[str, Any]:
    """`measured` and `interval` of what was looked at: on the requests that it was not chosen by."""
    measured = None if looked is None else measured_prediction(looked)
    return {
        "draft": entry.draft, "nodes": entry.budget.nodes, "depth": entry.budget.depth, "speedup": entry.speedup,
        "tokens_per_cycle": entry.tokens_per_cycle, "break_even": entry.break_even,
        "measured": None if measured is None else measured.speedup,
        "interval": None if measured is None or measured.interval is None else list(measured.interval),
    }  # fmt: skip
