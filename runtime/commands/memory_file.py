"""`vlmexport run --memory FILE`: answers that are proposed again, from one run to the next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..common.atomic_files import check_folder
from ..common.errors import OptionError

if TYPE_CHECKING:
    from ..drafts.memory.answers import Memory


def opened_memory(path: Path | None) -> Memory | None:
    """The memory of the file `path`, a new one where there is none; None without a path. Raises `OptionError` for a file that
    is no memory, or cannot be written."""
    from ..drafts.memory.answers import Memory

    if path is None:
        return None
    check_folder("--memory", path)
    return Memory.load(path) if path.exists() else Memory()


def save_memory(memory: Memory | None, path: Path | None) -> None:
    """Writes what is remembered, also when the run was interrupted. Raises `OptionError` where that fails."""
    if memory is None or path is None or not len(memory):
        return
    try:
        memory.save(path)
    except OSError as error:
        raise OptionError(
            f"--memory {path}: cannot be written ({error.strerror}); choose another file"
        ) from error
