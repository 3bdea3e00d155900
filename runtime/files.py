"""Files outside of bundles: replaced as a whole, and the folder of the user's cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import OptionError
from .paths import look_at


@contextlib.contextmanager
def replacing(path: Path, scratch: Path | None = None) -> Iterator[BinaryIO]:
    """A file that takes the place of `path`, synced, when the block ends without an exception; else nothing is left of
    it. A kill leaves the old file or the new one, and perhaps `scratch` (default: `path` with `.new` behind it).

    Raises `OSError` that names `path`: that of a full disk names nothing.
    """
    scratch = path.with_name(path.name + ".new") if scratch is None else scratch
    try:
        with scratch.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        scratch.replace(path)
    except BaseException as error:
        scratch.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(scratch)):
            error.filename = str(path)
        raise


def write_file(path: Path, content: bytes | str) -> None:
    """Write a whole file (text: UTF-8, `?` for what it cannot hold), or leave what was there; a link stays one. Raises
    `OSError` naming `path`."""
    with replacing(path.resolve()) as out:
        out.write(content.encode(errors="replace") if isinstance(content, str) else content)


def check_folder(option: str, path: Path) -> None:
    """Raise `OptionError` where `path`, which `option` names, has no folder to be written in: before anything is measured."""
    _, found = look_at(path, OptionError, option)
    if found == "folder":
        raise OptionError(f"{option} {path}: is a folder; name a file")
    if found == "device":
        raise OptionError(f"{option} {path}: is a device or a pipe, which cannot be replaced; name a file")
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: the folder {path.parent} does not exist")


def cache_folder() -> Path:
    """Where vlmexport keeps what it can make again: `VLMEXPORT_CACHE`, or `vlmexport` in `XDG_CACHE_HOME` or
    `~/.cache`. Raises `RuntimeError` for a user without a home folder."""
    if named := os.environ.get("VLMEXPORT_CACHE"):
        return Path(named)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "vlmexport"
