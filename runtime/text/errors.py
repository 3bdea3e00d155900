"""Errors of a library as one line."""

from __future__ import annotations

_LONGEST = 300


def one_line(error: object, longest: int = _LONGEST) -> str:
    """What an error says, in one line: white space and control characters come from whoever wrote the bundle."""
    words = " ".join(str(error).split())
    shown = words if len(words) <= longest else words[: longest - 1] + "…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown) or type(error).__name__
