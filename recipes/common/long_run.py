"""A training that may be stopped at any time: its state on disk, its log, one process at a time.

A recipe asks `stopping` after every step and saves when `due` says so. SIGTERM and SIGINT end a run after the step
that is under way, with its state saved; the same command continues it.
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from vlmexport.runtime.common.atomic_files import atomic_write, cache_folder
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.common.locks import only_one


def recipe_folder(name: str) -> Path:
    """Where a recipe keeps its state unless told otherwise: the user's cache folder."""
    return cache_folder() / "recipes" / name


class LongRun:
    """The state file, the log and the stop signals of one training; use it in a `with` statement.

    Args:
        folder: receives ``state.pt``, ``log.jsonl`` and ``lock``.
        settings: what decides the result. A state with other settings is refused.
        save_every: seconds between two saves.

    Raises:
        OptionError: another process writes to `folder`, or its state belongs to other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], save_every: float = 300.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.settings, self.save_every = folder, settings, save_every
        self.path = folder / "state.pt"
        self.stopping = False
        self._saved = time.monotonic()
        self._handlers: dict[int, Any] = {}
        self._held = ExitStack()

    def __enter__(self) -> LongRun:
        self._held.enter_context(only_one(self.folder / "lock"))
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._held.close()

    def _stop(self, number: int, frame: object) -> None:
        self.stopping = True

    def load(self) -> dict[str, Any] | None:
        """The saved state, or None where there is none yet."""
        if not self.path.exists():
            return None
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        for name, value in self.settings.items():
            if state["settings"].get(name) != value:
                raise OptionError(
                    f"{self.path} was trained with {name} {state['settings'].get(name)!r}, not {value!r}; "
                    "use the same, or another --out"
                )
        return state

    def due(self) -> bool:
        """Whether it is time to save."""
        return self.stopping or time.monotonic() - self._saved >= self.save_every

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the state; a stop in the middle, also a power cut, leaves the old one whole."""
        with atomic_write(self.path) as out:
            torch.save(state | {"settings": self.settings}, out)
        self._saved = time.monotonic()

    def log(self, line: dict[str, Any]) -> None:
        """Appends one line to the log. After a resumption steps may come twice; the later line counts."""
        with (self.folder / "log.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")
