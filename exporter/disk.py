"""Disks that are full."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from ..runtime.errors import OptionError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def full_disk_in(folder: Path) -> Iterator[None]:
    """Turns the errors of a full disk into an OptionError that names the folder and says what is kept.

    PyTorch's writers raise an error of their own while the disk's is on its way, or hide it altogether.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not _is_full(error):
            raise
        raise OptionError(
            f"no space left on the disk of {folder}: free some, and the same command continues from what was saved"
        ) from error


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
