"""Locks between processes. A lock ends with the process that holds it, whichever machine or container that runs in.

A lock file is locked by `filelock`. What has to be known of a file or folder itself is whether its maker still lives
(`try_lock`): that lock is on it, so that no further file is needed. Where a file system has no locks, nobody waits and
nobody is refused.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import OptionError
from .foreign_errors import raise_if_foreign

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds that a process waits before it says so: most locks are held for milliseconds."""

_POLL = 0.005
"""Seconds between two tries. A manifest is held for about as long."""

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""What a file system without locks answers (some network and FUSE file systems)."""


@contextlib.contextmanager
def alone(path: Path, what: Path | None = None) -> Iterator[None]:
    """Waits, and says so once, until no other process or thread is inside the block with the lock file `path`, which
    stays. `what` is what the others are said to work on: by default the file's folder. Raises `OSError` where the file
    cannot be opened."""
    from filelock import Timeout

    lock = _lock(path)
    try:
        acquired = _acquired(lock, PATIENCE)
    except Timeout:
        log.warning("waiting for another process that works on %s", what or path.parent)
        acquired = _acquired(lock, -1)
    try:
        yield
    finally:
        if acquired:
            lock.release()


@contextlib.contextmanager
def only_one(path: Path, what: Path | None = None, remedy: str = "", kept: bool = True) -> Iterator[None]:
    """`OptionError`, with a further `remedy`, where another process is inside the block with the lock file `path`, which
    is `kept` or removed. `what` is what the other is said to write to: by default the file's folder. Raises `OSError`
    where the file cannot be opened."""
    from filelock import Timeout

    lock = _lock(path)
    try:
        held = _acquired(lock, 0)
    except Timeout as error:
        raise OptionError(
            f"another process writes to {what or path.parent}: wait for it, or give another folder{remedy}"
        ) from error
    try:
        yield
    finally:
        if not kept:
            remove(path)
        if held:
            lock.release()


def remove(path: Path) -> None:
    """Removes a lock file that this process holds: who waits for it finds that it is gone, and takes the next one."""
    with contextlib.suppress(OSError):  # Windows, where a file that is open stays
        path.unlink()


def remove_left(path: Path) -> None:
    """Removes a lock file that nobody holds: its holder was killed."""
    with taken_over(path) as is_left:
        if is_left:
            remove(path)


def _lock(path: Path) -> Any:
    from filelock import FileLock  # here: most commands lock nothing

    return FileLock(path, mode=0o666)  # whoever may write to the folder takes turns


def _acquired(lock: Any, timeout: float) -> bool:
    """Whether the lock is held now; not where the file system has none. Raises filelock's `Timeout`, `OSError`."""
    try:
        lock.acquire(timeout=timeout, poll_interval=_POLL)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            log.debug("%s: its file system has no locks (%s)", lock.lock_file, error.strerror)
            return False
        raise
    return True


# --- whether the maker of a file or folder lives: a lock on the thing itself ---


def try_lock(path: Path) -> int | None:
    """A lock on the file or folder `path`, for `release`; None where there are no locks. Raises `BlockingIOError` where
    another process holds it."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise_if_foreign(error)
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError as error:
        os.close(descriptor)
        raise_if_foreign(error)
        return None
    return descriptor


@contextlib.contextmanager
def taken_over(path: Path) -> Iterator[bool]:
    """Whether who made the file or folder `path` is dead: nobody holds it, and it is held meanwhile. False where there are no
    locks."""
    try:
        lock = try_lock(path)
    except BlockingIOError:
        lock = None
    try:
        yield lock is not None and is_still(path, lock)
    finally:
        release(lock)


def release(lock: int | None) -> None:
    """Ends a lock of `try_lock`."""
    if lock is not None:
        with contextlib.suppress(OSError):
            os.close(lock)


def is_still(path: Path, lock: int) -> bool:
    """Whether `path` is what was locked."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(lock))
    except OSError as error:
        raise_if_foreign(error)
        return False
