"""The folders of a build while it runs, and what a killed one leaves of them.

A build holds a lock on its folders as long as it lives, whichever machine or container it runs in: a process id would
mean nothing to the others that share a volume. The lock (`flock`) is on the folder itself, so that no file of it can get
into a bundle, and it ends with the process. Where a file system knows no such lock (NFS refuses it on folders), or the
system none at all (Windows), nothing is held and nothing is taken for a leftover: remove it yourself.
"""

from __future__ import annotations

import contextlib
import glob
import secrets
import shutil
from pathlib import Path

from ...runtime.common.locks import is_still, release, taken_over, try_lock


def new_folder(output: Path) -> tuple[Path, int | None]:
    """(a new folder beside `output` to build in, its lock). OSError where it cannot be made."""
    while True:
        folder = output.with_name(f".{output.name}.building-{secrets.token_hex(4)}")
        folder.mkdir()
        with contextlib.suppress(BlockingIOError):
            lock = try_lock(folder)
            if lock is None or is_still(folder, lock):
                return folder, lock
            release(lock)
        # Another build took it for a leftover before it was locked.


def remove_leftovers(output: Path) -> None:
    """Removes what a killed build left beside `output`; a bundle that it had only moved aside comes back."""
    for kind in ("old", "building"):
        for path in output.parent.glob(f".{glob.escape(output.name)}.{kind}-*"):
            with taken_over(path) as is_left:
                if not is_left:
                    continue  # its build lives, or has just come to its end
                if kind == "old" and not output.exists():
                    path.rename(output)
                else:
                    shutil.rmtree(path, ignore_errors=True)
