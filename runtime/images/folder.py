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


def pictures_below(folder: Path) -> list[Path]:
    """The picture files of a folder and of all folders in it, each folder's own first, as `picture_files` orders them. Links to
    folders, and folders whose names begin with a dot, are left out. Raises `ImageError` where there is none, and for a
    folder that cannot be read."""
    found: list[Path] = []
    for place, inner, names in os.walk(folder, onerror=_refuse):
        inner[:] = sorted((name for name in inner if not name.startswith(".")), key=_natural)
        found += [Path(place, name) for name in sorted(filter(is_picture, names), key=_natural)]
    if not found:
        raise ImageError(f"{folder}: neither the folder nor a folder in it has picture files")
    return found


def _refuse(error: OSError) -> None:
    raise ImageError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts numbers in names by their value."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
