"""A figure with its bootstrapped 95 % interval, as result files hold it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from vlmexport.runtime.measure.bootstrap import interval


def with_interval(
    values: Sequence[Any],
    statistic: Callable[[Sequence[Any]], float] = statistics.median,
    name: str = "median",
) -> dict[str, float | None]:
    """The statistic of the values under `name`, with `low` and `high`; None of too few values."""
    low, high = interval(statistic, values) or (None, None)
    return {name: statistic(values), "low": low, "high": high}


def shown(found: dict[str, float | None], name: str = "median") -> str:
    """``1.234 [1.200 – 1.260]``."""
    if found["low"] is None:
        return f"{found[name]:.3f}"
    return f"{found[name]:.3f} [{found['low']:.3f} – {found['high']:.3f}]"
