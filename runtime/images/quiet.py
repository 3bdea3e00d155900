"""Keep what C libraries write to stderr (libtiff, about damaged files) from standing beside our one line."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries() -> Iterator[bool]:
    """File descriptor 2 leads nowhere within the block; yields whether it does.

    The descriptor is the whole process's: this is for a command of ours that has a single thread, and does nothing
    where there are more. A program that uses the runtime as a library hears libtiff as before.
    """
    saved = -1
    if threading.active_count() == 1:
        with contextlib.suppress(OSError):  # started with stderr closed
            saved = os.dup(2)
    if saved < 0:
        yield False
        return
    try:
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield True
    finally:
        os.dup2(saved, 2)
        os.close(saved)
