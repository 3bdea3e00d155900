"""A folder that is complete takes the place of another one, or none: a kill, or a loss of power, leaves one of them whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ...runtime.common.locks import release, try_lock
from ..common.write_errors import FULL
from .leftovers import new_folder, remove_leftovers

_AT_FDCWD, _EXCHANGE = -100, 2


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Gives a new folder beside `folder` that takes its place when the block ends without an exception; else it is removed.

    What a kill left beside `folder` is removed first. Raises `OSError`.
    """
    remove_leftovers(folder)
    work, lock = new_folder(folder)
    try:
        yield work
        take_place(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        release(lock)


def take_place(work: Path, output: Path) -> None:
    """Writes `work` to the disk, gives it the name `output`, and removes the folder that had it. Raises `OSError`; `output`
    is then as it was.

    On Linux both change their names in one step. Elsewhere, and on file systems that cannot do that, nothing has the name for
    a moment: what a kill leaves then, `remove_leftovers` brings back.
    """
    sync_folder(work)
    if not output.exists():
        work.rename(output)
    elif not exchange(work, output):
        _rename_twice(work, output)
    _sync(output.parent)
    shutil.rmtree(work, ignore_errors=True)  # by now what was there before


def exchange(one: Path, other: Path) -> bool:
    """Lets two paths change their names in one step; False, and nothing is done, where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:  # an older C library
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0


def _rename_twice(work: Path, output: Path) -> None:
    old = work.with_name(work.name.replace(".building-", ".old-"))
    lock = None
    with contextlib.suppress(BlockingIOError):
        lock = try_lock(output)
    try:
        output.rename(old)
        work.rename(output)
    finally:
        if old.exists():
            # A folder that is called old is whole. While it is removed it has another name.
            old.rename(work if output.exists() else output)
        release(lock)


def sync_folder(folder: Path) -> None:
    """Waits until every file of a folder, and every name in it, is on the disk: without that, a loss of power soon after could
    leave empty files under their final names. Raises `OSError` for a disk that is full or broken."""
    for place, _, names in os.walk(folder):
        for name in names:
            _sync(Path(place) / name)
        _sync(Path(place))


def _sync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (*FULL, errno.EIO):
            raise  # else: folders on Windows, or a file system that has no such call
