"""Programs of the checkout, in processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def program(module: str, *words: object) -> list[str]:
    """The command `python -m module words …`, for a process with `environment()` or with `ROOT` as its folder."""
    return [sys.executable, "-m", module, *map(str, words)]


def environment() -> dict[str, str]:
    """Variables of a process that finds the checkout's packages wherever it runs."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
