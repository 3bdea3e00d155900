"""One process at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Makes the file's folder, then waits, and says so, until nobody else is inside the block with this file, which stays. Where
    there are no such locks (Windows), it does not wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that works on {path.parent}", file=sys.stderr)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
