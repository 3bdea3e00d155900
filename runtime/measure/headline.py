"""The one figure of a `bench` run, in the words that the table, the plot and the demo share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def headline(report: Mapping[str, Any]) -> str:
    """How much faster decoding was, and what that figure is: "2.05 times as fast: the median of 5 pairs, 1.60 to 2.50".

    `report`: of `benchmark.measure`. A pair is a repeat: the requests decoded plainly, and right after that with the draft.
    """
    speedup, pairs = report["speedup"], report["repeats"]
    if pairs == 1:
        return f"{speedup['decode']:.2f} times as fast: one pair"
    between = f"{speedup['decode_min']:.2f} to {speedup['decode_max']:.2f}"
    return f"{speedup['decode']:.2f} times as fast: the median of {pairs} pairs, {between}"
