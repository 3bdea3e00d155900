"""Errors of other libraries in one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What an error says, in one line; the next one too where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
