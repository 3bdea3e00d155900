"""Errors of other libraries in one line."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours and control characters, but for tabs and the ends of lines."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line, without colours; the next one too where the first only announces it."""
    told = (_CONTROL.sub("", line).strip() for line in str(error).splitlines())
    lines = list(filter(None, told)) or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
