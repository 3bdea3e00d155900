"""What a target's answers are worth, by task: one file each, named as the task, with `_` for `-`.

A module has `RANKS` (whether it needs the target's ranking of a record's choices) and `score(told)`. Drafts never change
an answer, so these are figures of the target, the same for every draft.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Protocol, cast

from ....runtime.common.errors import OptionError
from .told import Score, Told


class Task(Protocol):
    """What a module of a task has."""

    RANKS: bool

    def score(self, told: Sequence[Told]) -> Score: ...


_HELPERS = ("told", "words")


def names() -> list[str]:
    """Names of all tasks; nothing is imported."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in modules if name not in _HELPERS)


def open_task(name: str) -> Task:
    """The module of a task. Raises OptionError for an unknown one."""
    if name not in names():
        raise OptionError(f"--task {name!r:.40} is none of {', '.join(['auto', 'none', *names()])}")
    return cast(Task, importlib.import_module(f".{name.replace('-', '_')}", __name__))


__all__ = ["Score", "Task", "Told", "names", "open_task"]
