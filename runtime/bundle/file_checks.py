"""Compare the files of a bundle with what its manifest says of them. Every function raises `BundleError`."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Container
from pathlib import Path
from typing import BinaryIO

from ..common.errors import BundleError
from ..common.foreign_errors import raise_if_foreign
from .manifest import FileInfo
from .manifest_changes import is_own
from .manifest_file import COPY_IN, REBUILD
from .verified_cache import Mark, mark


def compare_checksum(
    path: Path, info: FileInfo, progress: Callable[[int], None] | None = None
) -> os.stat_result:
    """Compare a file with its SHA-256; returns what the file was when the comparison began.

    `progress(bytes)` is called after each block."""
    digest = hashlib.sha256()
    with _open(path) as stream:
        status = os.fstat(stream.fileno())
        while block := stream.read(1 << 20):
            digest.update(block)
            if progress is not None:
                progress(len(block))
    if digest.hexdigest() != info.sha256:
        raise BundleError(
            f"{path}: SHA-256 is {digest.hexdigest()[:12]}…, the manifest says "
            f"{info.sha256[:12]}…: the file was changed; {REBUILD}"
        )
    return status


def verified_mark(path: Path, info: FileInfo, known: Mark | None) -> Mark:
    """The mark of a file that has its checksum. The file is read unless its mark is the `known` one."""
    try:
        present = mark(path.stat(), info.sha256)
    except OSError as error:
        raise_if_foreign(error)
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from error
    return present if present == known else mark(compare_checksum(path, info), info.sha256)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise_if_foreign(error)
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from error


def check_file(bundle: Path, name: str, info: FileInfo) -> os.stat_result:
    """The listed file `name` is a regular file of its size inside the folder `bundle`."""
    path = bundle / name
    try:
        real = path.resolve(strict=True)
        status = real.stat()
    except FileNotFoundError:
        raise BundleError(f"{path}: listed in the manifest but missing; {REBUILD}") from None
    except (OSError, RuntimeError) as error:
        raise_if_foreign(error)
        raise BundleError(f"{path}: cannot be read ({error})") from error
    if not real.is_relative_to(bundle.resolve()):
        raise BundleError(f"{path}: leads out of the bundle to {real}; {COPY_IN}")
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path}: is not a regular file; {REBUILD}")
    if status.st_size != info.bytes:
        raise BundleError(
            f"{path}: {status.st_size} bytes, the manifest says {info.bytes}: cut off or changed; {REBUILD}"
        )
    return status


def check_nothing_else(bundle: Path, listed: Container[str]) -> None:
    """The folder holds the `listed` files, what a writer of the manifest has beside it, and nothing else."""
    for folder, inner, names in os.walk(bundle):
        for name in inner:
            if (Path(folder) / name).is_symlink():
                raise BundleError(
                    f"{Path(folder) / name}: is a link to a folder; copy the files in instead of linking them"
                )
            if is_own((Path(folder) / name).relative_to(bundle).as_posix()):
                raise BundleError(
                    f"{Path(folder) / name}: is a folder, where writers of the bundle have a file; remove it"
                )
        for name in names:
            relative = (Path(folder) / name).relative_to(bundle).as_posix()
            if not is_own(relative) and relative not in listed:
                raise BundleError(
                    f"{bundle / relative}: not listed in the manifest; move it out of the bundle"
                )
