"""The frozen image side's outputs, computed once into a flat file, block by block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from vlmexport.calibration.data.scenes.dataset import model_picture

from .ahead import drawn_ahead
from .captioner import Captioner

BLOCK = 500  # pictures between two notes of the progress


def image_rows(
    path: Path,
    captioner: Captioner,
    seed: int,
    indices: range,
    stopping: Callable[[], bool] = lambda: False,
    workers: int = 1,
    shown: np.ndarray | None = None,
) -> np.ndarray | None:
    """Renders and encodes scenes into `path`; an interrupted file is continued at its last block.

    The image side is frozen, so a row is the same in every step.

    Args:
        path: a complete file is reused as it is.
        captioner: its image side, float32. seed, indices: which scenes.
        stopping: asked after every block. workers: see `stored_rows`. shown: their pictures, where they are rendered already.

    Returns:
        read-only memory map, float16 (2N, rows, width); row N + r belongs to the mirrored picture of row r. None where
        `stopping` said so before the file was complete.
    """
    count = len(indices)

    def write(store: np.ndarray, start: int, stop: int) -> None:
        if shown is None:
            pictures = np.stack([model_picture(seed, i, captioner.side) for i in indices[start:stop]])
        else:
            pictures = shown[start:stop]
        store[start:stop] = captioner.rows(pictures).numpy()
        store[count + start : count + stop] = captioner.rows(pictures[:, :, ::-1]).numpy()

    return stored_rows(path, (2 * count, *captioner.shape), count, write, stopping, workers)


def stored_rows(
    path: Path,
    shape: tuple[int, ...],
    count: int,
    write: Callable[[np.ndarray, int, int], None],
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

        def written(number: int) -> int:  # in a fork, too: the file is mapped for all of them
            write(store, *blocks[number])
            return blocks[number][1]

        ask = drawn_ahead(written, len(blocks), workers if workers > 1 else 0)
        for number in range(len(blocks)):
            stop = ask(number)
            store.flush()
            scratch = note.with_suffix(".new")
            scratch.write_text(str(stop))
            scratch.replace(note)
            if stopping() and stop < count:
                return None
        partial.replace(path)
        note.unlink(missing_ok=True)
    return np.memmap(path, np.float16, "r", shape=shape)
