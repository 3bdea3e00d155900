"""One process at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..runtime.errors import OptionError


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


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Makes the file's folder and the file, which stays. OptionError where another process is inside the block with it. Where
    there are no such locks (Windows, some network folders), nobody is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as held:
        try:
            import fcntl

            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OptionError(
                f"another process writes to {path.parent}: wait for it, or give another folder; several processes of one "
                "training are started by torchrun"
            ) from error
        except (ImportError, OSError):
            pass
        yield
