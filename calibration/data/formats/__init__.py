"""Forms of data, one file each: `--data NAME:…` is read by the module NAME of this folder, with `_` for `-`.

A module has

| | |
|---|---|
| `USAGE` | what stands behind the colon (`arguments.py`) |
| `TASK` | what its records are judged by, a name of `evaluation/quality`, or None |
| `load(arguments, prompt, problems)` | its records; `prompt` is for those that have none of their own |

so that another form is another file and nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from ..reading.arguments import Arguments
from ..reading.records import Problems, Record


class Format(Protocol):
    """What a module of this folder has."""

    USAGE: str
    TASK: str | None

    def load(self, arguments: Arguments, prompt: str, problems: Problems) -> list[Record]: ...


def names() -> list[str]:
    """Names of all forms; nothing is imported."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def open_format(name: str) -> Format:
    """The module of a form in `names()`."""
    return cast(Format, importlib.import_module(f".{name.replace('-', '_')}", __name__))
