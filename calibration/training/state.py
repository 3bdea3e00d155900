"""Checkpoints of a run: one file, replaced atomically, that holds all a resumed run needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...runtime.common.atomic_files import atomic_write
from ...runtime.common.errors import OptionError
from ...runtime.common.foreign_errors import raise_if_foreign

FILE = "state.pt"


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Replaces the file; a kill or a full disk leaves the old one."""
    with atomic_write(folder / FILE) as out:
        torch.save(state, out)


def forget_state(folder: Path) -> None:
    """A run begins anew; a kill before its first state leaves none of another run."""
    (folder / FILE).unlink(missing_ok=True)


def load_state(
    folder: Path, run: dict[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The last state, or None when there is none.

    Args:
        folder: of the run.
        run: options, target and data of this run, which must equal the stored ones.
        defaults: of options; a run that was begun before an option existed had its default.

    Raises:
        OptionError: the folder belongs to a run with other options; names the first that differs.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not isinstance(state.get("run"), dict):
            raise TypeError("not a run's state")
    except Exception as error:  # any damage means the same to the user
        raise_if_foreign(error)
        raise OptionError(
            f"{path} cannot be read ({type(error).__name__}); delete it or use --restart"
        ) from error
    stored = {**(defaults or {}), **state["run"]}
    for name, value in run.items():
        if stored.get(name) != value:
            raise OptionError(
                f"{folder} holds a run with {name} = {stored.get(name)!r}, this one has {value!r}; "
                "give another -o, or --restart to begin anew"
            )
    return state
