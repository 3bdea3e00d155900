"""What commands share: JSON on stdout, numbers for people, the console."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: dict[str, Any]) -> None:
    """Write one JSON object and a newline to stdout; nothing else may be written there."""
    sys.stdout.write(as_text(value))
    sys.stdout.flush()


def as_text(value: dict[str, Any]) -> str:
    """A JSON object as the commands print it, with a newline behind it."""
    return json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def console(stderr: bool = False) -> Console:
    """A rich console; plain text when the output is not a terminal."""
    from rich.console import Console

    return Console(
        stderr=stderr, highlight=False, soft_wrap=not (sys.stderr if stderr else sys.stdout).isatty()
    )


def size(count: float) -> str:
    """Bytes for people: `17.2 MB` (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def picture_size(count: int) -> str:
    """What is said of the bytes of the largest picture behind those of a sequence; nothing of a model of text."""
    return f", {size(count)} of them the largest picture" if count else ""


def quantity(count: float) -> str:
    """A count for people: `4.3 M`."""
    for unit in ("", " k", " M"):
        if abs(count) < 1000:
            return f"{count:.0f}{unit}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f} G"
