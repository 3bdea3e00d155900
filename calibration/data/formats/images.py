"""Every picture of a folder, without text: for `generate-data`, which lets the target tell it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ....runtime.common.errors import OptionError
from ....runtime.common.paths import is_folder
from ....runtime.images.endings import is_picture
from ..reading.arguments import Arguments
from ..reading.entries import gather
from ..reading.places import is_file, picture
from ..reading.records import Problems, Record

USAGE = "FOLDER"
TASK = None


def folder_of_pictures(path: Path) -> Path | None:
    """`path` where it is a folder with pictures in it, the folder of a picture; None for anything else."""
    if is_picture(path) and is_file(path):
        return path.parent
    if is_folder(path) and any(map(is_picture, path.iterdir())):
        return path
    return None


def load(arguments: Arguments, prompt: str, problems: Problems) -> list[Record]:
    """One record per file, in the order of their paths. Raises OptionError where there is no such folder."""
    folder = arguments.path(0)
    if not is_folder(folder):
        raise OptionError(f"--data images:{folder}: no such folder")

    def record(number: int, path: Path) -> Iterator[Record]:
        yield Record(str(path.relative_to(folder)), prompt, picture(path, problems.inside))

    paths = sorted(p for p in folder.rglob("*") if is_picture(p))
    return gather(((str(path), path) for path in paths), record, problems)
