"""Folders of pictures: which of their files are pictures, and in what order."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..common.errors import ImageError
from ..common.foreign_errors import raise_if_foreign
from .endings import is_picture


def picture_files(folder: Path) -> list[Path]:
    """The files whose names end as those of pictures that are read, `frame9.png` before `frame10.png`. Raises `ImageError`
    where there is none."""
    try:
        names = [entry.name for entry in os.scandir(folder) if is_picture(entry.name)]
    except OSError as error:
        raise_if_foreign(error)
        raise ImageError(f"{folder}: cannot be read ({error.strerror})") from error
    if not names:
        raise ImageError(f"{folder}: the folder has no picture files")
    return [folder / name for name in sorted(names, key=_natural)]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts numbers in names by their value."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
