"""Pictures as a model sees them, rendered once into a flat file."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from ....runtime.hardware.machine import cores
from .film import sample_film
from .render import render
from .scene import Scene, sample_scene

PICTURE = 384  # side of the picture that is drawn before the model's own resize


def model_picture(seed: int, index: int, side: int) -> np.ndarray:
    """A scene's picture after the bicubic resize of the model's image processor.

    Returns:
        uint8 array (side, side, 3).
    """
    return resized(sample_scene(seed, index), side)


def resized(scene: Scene, side: int) -> np.ndarray:
    """The picture of a scene, drawn and resized as `model_picture` says."""
    return resized_to(scene, side)[0]


def resized_to(scene: Scene, *sides: int) -> list[np.ndarray]:
    """The picture of a scene as `resized` has it, drawn once for several sides."""
    picture = Image.fromarray(render(scene, PICTURE))
    return [np.asarray(picture.resize((side, side), Image.Resampling.BICUBIC)) for side in sides]


def film_pictures(seed: int, index: int, side: int) -> np.ndarray:
    """A film's frames as `model_picture` has pictures.

    Returns:
        uint8 array (frames, side, side, 3).
    """
    return np.stack([resized(frame, side) for frame in sample_film(seed, index).frames])


def prerender(path: Path, seed: int, indices: range, side: int, workers: int | None = None) -> np.ndarray:
    """Renders ``indices`` into ``path`` (once: an existing complete file is reused) with so many processes, by default
    one per core.

    Returns:
        read-only memory map, uint8 (len(indices), side, side, 3).
    """
    shape = (len(indices), side, side, 3)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        np.memmap(partial, np.uint8, "w+", shape=shape).flush()
        step = 1000
        jobs = [
            (str(partial), seed, indices, side, at, min(at + step, len(indices)))
            for at in range(0, len(indices), step)
        ]
        with ProcessPoolExecutor(workers or cores()) as pool:
            _drain(pool.map(_render_block, *zip(*jobs, strict=True)))
        partial.replace(path)
    return np.memmap(path, np.uint8, "r", shape=shape)


def _drain(results: Iterable[None]) -> None:
    for _ in results:
        pass


def _render_block(path: str, seed: int, indices: range, side: int, start: int, stop: int) -> None:
    shape = (len(indices), side, side, 3)
    store = np.memmap(path, np.uint8, "r+", shape=shape)
    for row in range(start, stop):
        store[row] = model_picture(seed, indices[row], side)
    store.flush()
