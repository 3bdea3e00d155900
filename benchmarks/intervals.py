"""A figure with its bootstrapped 95 % interval, as result files hold it, or with the least and the most of a few seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from vlmexport.runtime.tuning.bootstrap import interval


def with_interval(
    values: Sequence[Any],
    statistic: Callable[[Sequence[Any]], float] = statistics.median,
    name: str = "median",
) -> dict[str, float | None]:
    """The statistic of the values under `name`, with `low` and `high`; None of too few values."""
    low, high = interval(statistic, values) or (None, None)
    return {name: statistic(values), "low": low, "high": high}


def shown(interval: dict[str, float | None], form: str = ".3f") -> str:
    """The median with its interval in a number's format: ``1.234 [1.200 – 1.260]``."""
    middle, low, high = (
        "" if interval[name] is None else format(interval[name], form) for name in ("median", "low", "high")
    )
    return f"{middle} [{low} – {high}]" if low else middle


def between(values: Sequence[float], form: str = ".3f") -> str:
    """The mean with the least and the most in a number's format: ``1.234 [1.200 – 1.260]``."""
    middle, low, high = (format(value, form) for value in (statistics.mean(values), min(values), max(values)))
    return f"{middle} [{low} – {high}]"
