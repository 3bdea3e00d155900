"""What libraries say about damaged pictures does not stand beside a command's one line: their log, their stderr."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator

_NOWHERE = logging.NullHandler()


def quiet_log() -> None:
    """What Pillow logs where nobody configured logging is dropped in place of printed. Again: does nothing."""
    logging.getLogger("PIL").addHandler(_NOWHERE)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[bool]:
    """File descriptor 2, to which C libraries write (libtiff), leads nowhere within the block; yields whether it does.

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
