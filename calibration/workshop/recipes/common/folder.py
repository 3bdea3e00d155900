"""Files of models: a folder that is replaced while others may read it, and names of contents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_files(folder: Path) -> Iterator[Path]:
    """Yields a folder beside `folder` to write into; its files then replace those in `folder`, each in one move."""
    scratch = folder.with_name(folder.name + ".new")
    yield scratch
    folder.mkdir(parents=True, exist_ok=True)
    for item in sorted(scratch.iterdir()):
        item.chmod(0o644)
        item.replace(folder / item.name)
    scratch.rmdir()


def digest(path: Path) -> str:
    """A short name for what a file holds."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
