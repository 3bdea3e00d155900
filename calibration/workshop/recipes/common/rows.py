"""The frozen image side's outputs, computed once into a flat file, block by block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...scenes.dataset import model_picture
from .captioner import Captioner

BLOCK = 500  # pictures between two notes of the progress


def image_rows(
    path: Path,
    captioner: Captioner,
    seed: int,
    indices: range,
    stopping: Callable[[], bool] = lambda: False,
) -> np.ndarray | None:
    """Renders and encodes scenes into `path`; an interrupted file is continued at its last block.

    The image side is frozen, so a row is the same in every step.

    Args:
        path: a complete file is reused as it is.
        captioner: its image side, float32. seed, indices: which scenes.
        stopping: asked after every block.

    Returns:
        read-only memory map, float16 (2N, rows, width); row N + r belongs to the mirrored picture of row r. None where
        `stopping` said so before the file was complete.
    """
    count = len(indices)

    def write(store: np.ndarray, start: int, stop: int) -> None:
        pictures = np.stack([model_picture(seed, i, captioner.side) for i in indices[start:stop]])
        store[start:stop] = captioner.rows(pictures).numpy()
        store[count + start : count + stop] = captioner.rows(pictures[:, :, ::-1]).numpy()

    return stored_rows(path, (2 * count, *captioner.shape), count, write, stopping)


def stored_rows(
    path: Path,
    shape: tuple[int, ...],
    count: int,
    write: Callable[[np.ndarray, int, int], None],
    stopping: Callable[[], bool] = lambda: False,
) -> np.ndarray | None:
    """Fills `path` block by block; an interrupted file is continued at its last block.

    Args:
        path: a complete file is reused as it is. shape: of the float16 array. count: what the blocks run over.
        write: puts the results of start to stop into the array, which is zero at first.
        stopping: asked after every block.

    Returns:
        read-only memory map; None where `stopping` said so before the file was complete.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial, note = path.with_suffix(".partial"), path.with_suffix(".done")
        known = int(note.read_text()) if note.exists() and partial.exists() else 0
        store = np.memmap(partial, np.float16, "r+" if known else "w+", shape=shape)
        for start in range(known, count, BLOCK):
            stop = min(start + BLOCK, count)
            write(store, start, stop)
            store.flush()
            scratch = note.with_suffix(".new")
            scratch.write_text(str(stop))
            scratch.replace(note)
            if stopping() and stop < count:
                return None
        partial.replace(path)
        note.unlink(missing_ok=True)
    return np.memmap(path, np.float16, "r", shape=shape)
