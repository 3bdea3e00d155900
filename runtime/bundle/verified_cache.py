"""`check="once"`: which files of a bundle were compared with their checksums, remembered between processes.

The one thing that the runtime writes without being given a place: a small JSON file per bundle folder in the user's
cache (`~/.cache/vlmexport/verified/`; `VLMEXPORT_CACHE` or `XDG_CACHE_HOME` name another place), and only when it is
asked for.

A file counts as verified while its inode, size and time of change (nanoseconds) are those of the moment it was compared,
and the manifest still names the checksum that it had. What rots on the medium without being written is not seen: that
is what `check="sha256"` is for.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from ..common.atomic_files import atomic_write, cache_folder
from ..common.errors import OptionError
from ..common.foreign_errors import raise_if_foreign

LIMIT = 16 << 20
"""Bytes. A larger record is not one of ours."""

Mark = tuple[int, int, int, str]
"""Inode, size, time of change in nanoseconds, SHA-256."""


Identity = tuple[int, int, int, int]
"""Device, inode, size, time of change in nanoseconds: what tells one file from another that took its place."""


def identity(status: os.stat_result) -> Identity:
    """Which file it is that has this status."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def mark(status: os.stat_result, sha256: str) -> Mark:
    """What is kept of a file that had this status and checksum."""
    return status.st_ino, status.st_size, status.st_mtime_ns, sha256


def record_path(bundle: Path) -> Path:
    """Where the record of a bundle folder lies. Raises `OptionError` where the user has no cache folder."""
    try:
        cache = cache_folder()
    except RuntimeError as error:  # no home folder
        raise_if_foreign(error)
        raise _cannot(Path("~/.cache"), error) from error
    name = hashlib.sha256(os.fsencode(bundle.resolve())).hexdigest()[:32]
    return cache / "verified" / f"{name}.json"


def read_record(path: Path) -> dict[str, Mark]:
    """File → what it was when it was compared. Anything that is not a record counts as none."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LIMIT:
            return {}
        files = json.loads(path.read_bytes())["files"]
        return {str(name): _mark(entry) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise_if_foreign(error)
        return {}


def write_record(path: Path, bundle: Path, files: dict[str, Mark]) -> None:
    """Replace the record in one step. Raises `OptionError` when it cannot be written."""
    text = json.dumps({"bundle": str(bundle.resolve()), "files": files}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as out:
            out.write(text.encode(errors="replace"))
    except OSError as error:
        raise_if_foreign(error)
        raise _cannot(path, error) from error


def _mark(entry: Any) -> Mark:
    inode, size, time, sha256 = entry
    return int(inode), int(size), int(time), str(sha256)


def _cannot(path: Path, error: Exception) -> OptionError:
    reason = getattr(error, "strerror", None) or error
    return OptionError(
        f"check: 'once' cannot remember in {path} ({reason}); set VLMEXPORT_CACHE to a folder that may be written, or use "
        "'sha256'"
    )
