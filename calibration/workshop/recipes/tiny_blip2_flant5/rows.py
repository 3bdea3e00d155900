"""The frozen vision side's outputs, computed once into a flat file, block by block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import Blip2ForConditionalGeneration

from ...scenes.dataset import model_picture
from .model import QUERIES, SIDE, WIDTH
from .vision_stage import encode, to_pixels

BLOCK = 500  # pictures between two notes of the progress


@torch.no_grad()
def picture_rows(model: Blip2ForConditionalGeneration, pictures: np.ndarray, chunk: int = 100) -> np.ndarray:
    """Q-Former outputs of uint8 pictures (B, side, side, 3): float32 (B, 8, width)."""
    found = [encode(model, to_pixels(pictures[a : a + chunk]))[1] for a in range(0, len(pictures), chunk)]
    return torch.cat(found).float().numpy()


def image_rows(path: Path, model: Blip2ForConditionalGeneration, seed: int, indices: range) -> np.ndarray:
    """Renders and encodes scenes into `path`; an interrupted file is continued at its last block.

    The vision side is frozen, so a row is the same in every step.

    Args:
        path: a complete file is reused as it is.
        model: vision tower and Q-Former, float32. seed, indices: which scenes.

    Returns:
        read-only memory map, float16 (2N, 8, width); row N + r belongs to the mirrored picture of row r.
    """
    count = len(indices)
    shape = (2 * count, QUERIES, WIDTH)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial, note = path.with_suffix(".partial"), path.with_suffix(".done")
        known = int(note.read_text()) if note.exists() and partial.exists() else 0
        store = np.memmap(partial, np.float16, "r+" if known else "w+", shape=shape)
        for start in range(known, count, BLOCK):
            stop = min(start + BLOCK, count)
            pictures = np.stack([model_picture(seed, i, SIDE) for i in indices[start:stop]])
            store[start:stop] = picture_rows(model, pictures)
            store[count + start : count + stop] = picture_rows(model, pictures[:, :, ::-1])
            store.flush()
            scratch = note.with_suffix(".new")
            scratch.write_text(str(stop))
            scratch.replace(note)
        partial.replace(path)
        note.unlink(missing_ok=True)
    return np.memmap(path, np.float16, "r", shape=shape)
