"""Checks of option values that a caller gives: the right type and range, or one line that names both."""

from __future__ import annotations

import math
import operator
from typing import Any

from .errors import OptionError, VlmexportError
from .foreign_errors import from_signal_handler

ADAPTIVE = ("off", "request", "session", "confidence")
"""What the draft length depends on: nothing, the request so far, every request of the session so far, or how sure the
draft is, by Draft & Verify's threshold."""

CHANNELS = ("rgb", "bgr")
"""Orders of an image array's last axis; bgr is OpenCV's."""


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int in low..high (numpy integers too). Raises `OptionError` for anything else, bool included."""
    try:
        result = operator.index(value)
    except TypeError as error:
        if from_signal_handler(error):
            raise
        result = None
    if result is None or isinstance(value, bool) or result < low or (high is not None and result > high):
        span = f"≥ {low}" if high is None else f"in {low}..{high}"
        raise OptionError(f"{name}: {value!r:.80} is not an integer {span}")
    return result


def number(name: str, value: Any, low: float, high: float = math.inf, above: bool = False) -> float:
    """`value` as a finite float in low..high, above `low` when `above`. Raises `OptionError` for anything else."""
    try:
        result = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        if from_signal_handler(error):
            raise
        result = math.nan
    if not math.isfinite(result) or not low <= result <= high or (above and result == low):
        span = f"{'>' if above else '≥'} {low:g}" + ("" if high == math.inf else f" and ≤ {high:g}")
        raise OptionError(f"{name}: {value!r:.80} is not a number {span}")
    return result


def check_colour_order(name: str, value: Any, error: type[VlmexportError] = OptionError) -> None:
    """Raises `error` for a value that is not one of `CHANNELS`."""
    if value not in CHANNELS:
        raise error(f"{name}: {value!r:.80} is not one of {', '.join(CHANNELS)}")
