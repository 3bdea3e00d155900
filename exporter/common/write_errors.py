"""Disks that are full, and folders that cannot be written to."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...runtime.common.errors import OptionError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def unwritable(folder: Path, error: OSError) -> OptionError:
    """The error that says why nothing can be written to `folder`."""
    remedy = ", or change its permissions" if error.errno in _REFUSED else ""
    return OptionError(f"cannot write to {folder}: {error.strerror}; give another folder{remedy}")


@contextlib.contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turns the errors of a full disk, and of a folder that this user may not write to, into an OptionError that names the
    folder; of a full disk it says what is kept.

    PyTorch's writers raise an error of their own while the disk's is on its way, or hide it altogether.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno in _REFUSED and _lies_in(error.filename, folder):
            raise unwritable(folder, error) from error
        if not _is_full(error):
            raise
        raise OptionError(
            f"no space left on the disk of {folder}: free some, and the same command continues from what was saved"
        ) from error


def _lies_in(file: Any, folder: Path) -> bool:
    """Whether an error is of this folder, or of what would lie in it."""
    return isinstance(file, str) and Path(file).absolute().is_relative_to(folder.absolute())


def _is_full(error: BaseException) -> bool:
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    numbers = [e.errno for e in chain if isinstance(e, OSError)]
    if numbers:
        return any(number in FULL for number in numbers)
    return any("PytorchStreamWriter" in str(e) for e in chain)
