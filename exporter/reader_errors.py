"""What the readers of files of tensors raise on damaged bytes: errors of any kind, told by where they were raised."""

from __future__ import annotations

import re
from types import TracebackType

READERS = (
    "torch",
    "safetensors",
    "pickle",
    "_pickle",
    "zipfile",
    "struct",
    "codecs",
    "collections",
    "weakref",
)
"""Packages whose code reads such a file."""
_CONTROL = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x1f\x7f]")


def raised_while_reading(error: Exception) -> bool:
    """Whether a reader raised `error`, which a function caught that called it; not a signal handler or another hook of the
    program, whose errors are its own."""
    place: TracebackType | None = error.__traceback__
    if place is None:
        return False
    caller = place.tb_frame
    while place.tb_next is not None:
        place = place.tb_next
    # What C code raises has the frame that called it.
    return place.tb_frame is caller or _package(place) in READERS


def _package(place: TracebackType) -> str:
    return str(place.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def reason(error: BaseException) -> str:
    """What an error says, in the first of its lines, without colours and control characters."""
    lines = [_CONTROL.sub("", line).strip() for line in str(error).splitlines()]
    return f"{next(filter(None, lines), type(error).__name__):.200}"
