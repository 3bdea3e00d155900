"""The frozen image side's outputs, computed once into a flat file, block by block."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...scenes.dataset import model_picture
from .captioner import Captioner

BLOCK = 500  # pictures between two notes of the progress

Write = Callable[[np.ndarray, int, int], None]
"""Puts the results of start to stop into an array."""

_work: Any = None  # what forks inherit: a closure cannot be sent to them


def image_rows(
    path: Path,
    captioner: Captioner,
    seed: int,
    indices: range,
    stopping: Callable[[], bool] = lambda: False,
    workers: int = 1,
) -> np.ndarray | None:
    """Renders and encodes scenes into `path`; an interrupted file is continued at its last block.

    The image side is frozen, so a row is the same in every step.

    Args:
        path: a complete file is reused as it is.
        captioner: its image side, float32. seed, indices: which scenes.
        stopping: asked after every block. workers: see `stored_rows`.

    Returns:
        read-only memory map, float16 (2N, rows, width); row N + r belongs to the mirrored picture of row r. None where
        `stopping` said so before the file was complete.
    """
    count = len(indices)

    def write(store: np.ndarray, start: int, stop: int) -> None:
        pictures = np.stack([model_picture(seed, i, captioner.side) for i in indices[start:stop]])
        store[start:stop] = captioner.rows(pictures).numpy()
        store[count + start : count + stop] = captioner.rows(pictures[:, :, ::-1]).numpy()

    return stored_rows(path, (2 * count, *captioner.shape), count, write, stopping, workers)


def stored_rows(
    path: Path,
    shape: tuple[int, ...],
    count: int,
    write: Write,
    stopping: Callable[[], bool] = lambda: False,
    workers: int = 1,
) -> np.ndarray | None:
    """Fills `path` block by block; an interrupted file is continued at its last block.

    Args:
        path: a complete file is reused as it is. shape: of the float16 array. count: what the blocks run over.
        write: puts the results of start to stop into the array, which is zero at first.
        stopping: asked after every block.
        workers: processes, each with one thread; 1 computes here, with all threads. Forks: `write` must leave a GPU alone.

    Returns:
        read-only memory map; None where `stopping` said so before the file was complete.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial, note = path.with_suffix(".partial"), path.with_suffix(".done")
        known = int(note.read_text()) if note.exists() and partial.exists() else 0
        store = np.memmap(partial, np.float16, "r+" if known else "w+", shape=shape)
        blocks = [(start, min(start + BLOCK, count)) for start in range(known, count, BLOCK)]
        with _written(write, store, partial, blocks, workers) as done:
            for stop in done:
                store.flush()
                scratch = note.with_suffix(".new")
                scratch.write_text(str(stop))
                scratch.replace(note)
                if stopping() and stop < count:
                    return None
        partial.replace(path)
        note.unlink(missing_ok=True)
    return np.memmap(path, np.float16, "r", shape=shape)


@contextmanager
def _written(
    write: Write, store: np.ndarray, path: Path, blocks: list[tuple[int, int]], workers: int
) -> Iterator[Iterable[int]]:
    """The ends of blocks, in order, as they are written to the array `store` in the file `path`."""
    global _work

    def here(block: tuple[int, int]) -> int:
        write(store, *block)
        return block[1]

    if workers == 1:
        yield map(here, blocks)
        return

    def there(block: tuple[int, int]) -> int:
        shared = np.memmap(path, np.float16, "r+", shape=store.shape)
        write(shared, *block)
        shared.flush()
        return block[1]

    _work = there
    with multiprocessing.get_context("fork").Pool(workers, _alone) as pool:
        yield pool.imap(_in_fork, blocks)


def _alone() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _in_fork(block: tuple[int, int]) -> int:
    return _work(block)
