"""Which pictures and videos data may name, and whether they are there.

A name may be anything: it comes from the data. With a folder to stay `inside`, what lies elsewhere when links are followed is
refused with the same words whether it exists or not.
"""

from __future__ import annotations

import os
from pathlib import Path

from ....runtime.common import paths
from ....runtime.common.errors import ImageError, OptionError
from ....runtime.common.paths import is_folder, path_text
from ....runtime.images.load import check_picture
from .records import ImageRef


def folder_to_stay_in(folder: Path | None) -> Path | None:
    """The folder of `--inside`, links followed. OptionError where there is none."""
    if folder is None:
        return None
    if not is_folder(folder):
        raise OptionError(f"--inside {path_text(folder)}: no such folder")
    return Path(os.path.realpath(folder))


def is_file(path: Path, inside: Path | None = None) -> bool:
    """Whether this is a regular file that data may name; False also for what can be no name."""
    return lies_inside(path, inside) and paths.is_file(path)


def lies_inside(path: Path, inside: Path | None) -> bool:
    """Whether a path, links followed, lies in the folder, which `folder_to_stay_in` gave; everything does where it is None."""
    if inside is None:
        return True
    try:
        # Each way up, too: behind a folder elsewhere it would tell whether that folder is there.
        ways = [path, *(Path(*path.parts[: at + 1]) for at, part in enumerate(path.parts) if part == "..")]
        return all(Path(os.path.realpath(way)).is_relative_to(inside) for way in ways)
    except ValueError:  # no path at all
        return False


def check_inside(what: str, path: Path, inside: Path | None) -> None:
    """ValueError for a path that lies elsewhere."""
    if not lies_inside(path, inside):
        raise ValueError(f"{what} {str(path)!r:.200} is not inside of {inside}")


def check_reference(image: ImageRef, inside: Path | None) -> None:
    """ValueError for a picture or video that lies elsewhere; of a row of a set, for one of the hub or of a folder elsewhere,
    and where the row names a file elsewhere."""
    if inside is None:
        return
    if image.file is not None:
        check_inside("image", Path(image.file), inside)
    if image.video is not None:
        _check_video(Path(image.video), inside)
    if image.row is not None:
        check_inside("set", Path(image.row[0]), inside)
        if not is_folder(Path(image.row[0])):  # else a set of the hub
            raise ValueError(f"set {image.row[0]!r:.200} is not inside of {inside}")
        check_row(image.row, inside)


def check_row(row: tuple[str, str, str, int, str], inside: Path | None) -> None:
    """ValueError where a row of a set names a file elsewhere in place of holding its picture."""
    from .hub_rows import open_rows

    source, config, split, number, column = row
    stored = None if inside is None else open_rows(source, config, split).picture(number, column)
    if stored is not None and not stored.get("bytes"):
        check_inside("image", Path(stored.get("path") or ""), inside)


def picture(path: Path, inside: Path | None) -> ImageRef:
    """A picture file. ValueError naming it where it lies elsewhere, or its header cannot be read."""
    check_inside("image", path, inside)
    if wrong := image_problem(path):
        raise ValueError(wrong)
    return ImageRef(file=str(path))


def image_problem(path: Path) -> str | None:
    """What is wrong with an image file by its header, or None."""
    if wrong := _missing(path):
        return f"image {str(path)!r:.200} {wrong}"
    try:
        check_picture(path)
    except ImageError as error:
        return f"image {str(path)!r:.200}: {str(error).removeprefix(f'{path}: ')}"
    return None


def video_file(path: Path, frames: int | None, inside: Path | None) -> ImageRef:
    """A video, or a folder of pictures; of `frames` pictures where a number is given. ValueError where there is none, or it
    lies elsewhere, or pictures of the folder do."""
    _check_video(path, inside)
    if not is_folder(path) and (wrong := _missing(path)):
        raise ValueError(f"video {str(path)!r:.200} {wrong}")
    return ImageRef(video=str(path), frames=frames)


def _check_video(path: Path, inside: Path | None) -> None:
    """ValueError for a video that lies elsewhere, and for a folder with pictures that do."""
    check_inside("video", path, inside)
    if inside is not None and is_folder(path):
        for entry in path.iterdir():
            check_inside("image", entry, inside)


def _missing(path: Path) -> str | None:
    """Why a name is that of no file, as the end of "NAME …"; None where it is."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError:  # NUL, or half of a surrogate pair
        return "does not exist: no file can have that name"
    return None if is_file(path) else "is not a regular file"
