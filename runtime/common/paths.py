"""What lies at a path that a caller names, whatever it is that was named: a prompt that was pasted, a number, nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from .errors import VlmexportError
from .foreign_errors import raise_if_foreign

PathKind = Literal["file", "folder", "device", "nothing"]
"""A device is all that is neither a regular file nor a folder: a pipe, a terminal, `/dev/zero`."""

MOST_SHOWN = 200
"""Characters of a path in a message."""


def look_at(path: Any, error: type[VlmexportError], what: str) -> tuple[Path, PathKind]:
    """`path`, and what is there. Links are followed.

    Raises `error`, with `what` before it ("the image"), for an empty one, one that no file can have (too long,
    a NUL, characters that the file system does not take) and what is no path.
    """
    try:
        text = os.fspath(path)
        if not text:
            raise error(f"{what}: its path is empty")
        location = Path(text)
        if location.is_file():
            return location, "file"
        if location.is_dir():
            return location, "folder"
        # `is_file` answers for a NUL or a character that cannot be written, `stat` says what is wrong.
        return location, "device" if _exists(location) else "nothing"
    except (OSError, TypeError, ValueError) as cause:
        raise_if_foreign(cause)
        reason = getattr(cause, "strerror", None) or str(cause)
        raise error(f"{what}: {path_text(path)} is not a path ({reason})") from cause


def path_text(path: Any) -> str:
    """A path in a message, in one line that is not long; what is no path as Python writes it."""
    text = str(path) if isinstance(path, str | os.PathLike) else repr(path)
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def is_file(path: str | Path) -> bool:
    """Whether this is a regular file; False also for what can be no name (`Path.is_file` raises for long ones)."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Whether this is a folder; False also for what can be no name."""
    return os.path.isdir(path)  # noqa: PTH112


def exists(path: str | Path) -> bool:
    """Whether there is something of this name; False also for what can be no name."""
    return os.path.exists(path)  # noqa: PTH110


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
