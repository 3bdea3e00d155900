"""Files outside of bundles: replaced as a whole, and the folder of the user's cache."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import OptionError
from .locks import is_still, release, taken_over, try_lock
from .paths import look_at

_SUFFIX = ".new"


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path`, synced, when the block ends without an exception; else nothing is left of
    it. A kill leaves the old file or the new one, and perhaps a scratch file beside it, which the next writer of the same
    file removes. Several may write at once: each has a scratch file of its own, and the last one's file stays.

    Raises `OSError` that names `path`: that of a full disk names nothing.
    """
    scratch, lock = None, None
    try:
        remove_scratch(path)
        scratch, out, lock = _new_scratch(path)
        with out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        scratch.replace(path)
    except BaseException as error:
        if scratch is not None:
            scratch.unlink(missing_ok=True)
        if isinstance(error, OSError) and (
            error.filename is None or is_scratch(Path(error.filename).name, path.name)
        ):
            error.filename = str(path)
        raise
    finally:
        release(lock)


def is_scratch(name: str, file: str) -> bool:
    """Whether `name` is that of a scratch file of `atomic_write` for the file called `file`."""
    middle = name.removeprefix(_prefix(file)).removesuffix(_SUFFIX)
    return name == f"{_prefix(file)}{middle}{_SUFFIX}" and re.fullmatch("[0-9a-f]{8}", middle) is not None


def remove_scratch(path: Path) -> None:
    """Removes scratch files for `path` whose writers were killed: nobody holds a lock on them."""
    for left in path.parent.glob(f"{glob.escape(_prefix(path.name))}*{_SUFFIX}"):
        if not is_scratch(left.name, path.name):
            continue  # somebody else's file
        with taken_over(left) as is_left:
            if is_left:
                left.unlink(missing_ok=True)


def _new_scratch(path: Path) -> tuple[Path, BinaryIO, int | None]:
    """(a new file beside `path`, open to be written, its lock). Raises `OSError`."""
    while True:
        scratch = path.with_name(f"{_prefix(path.name)}{secrets.token_hex(4)}{_SUFFIX}")
        out = scratch.open("xb")
        try:
            lock = try_lock(scratch)
            if lock is None or is_still(scratch, lock):
                return scratch, out, lock
            release(lock)
        except BlockingIOError:
            pass
        out.close()  # another writer took it for a leftover before it was locked, and removes it


def _prefix(file: str) -> str:
    """How names of scratch files for `file` begin; a long name is cut, so that there is room for the rest."""
    return f".{os.fsdecode(os.fsencode(file)[:200])}."


def write_file(path: Path, content: bytes | str) -> None:
    """Write a whole file (text: UTF-8, `?` for what it cannot hold), or leave what was there; a link stays one. Raises
    `OSError` naming `path`."""
    with atomic_write(path.resolve()) as out:
        out.write(content.encode(errors="replace") if isinstance(content, str) else content)


def check_folder(option: str, path: Path) -> None:
    """Raise `OptionError` where `path`, which `option` names, has no folder to be written in: before anything is measured."""
    _, kind = look_at(path, OptionError, option)
    if kind == "folder":
        raise OptionError(f"{option} {path}: is a folder; name a file")
    if kind == "device":
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
