"""How a square table of learned positions is resampled to a picture of any size (Qwen3-VL, arXiv 2511.21631): bilinearly,
corners on corners.

As transformers' `get_vision_interpolation_indices_and_weights` with `align_corners`, in float32 throughout: a floor that is
one off moves a patch to other entries.
"""

from __future__ import annotations

import numpy as np


def table_entries(patch_positions: np.ndarray, down: int, across: int, side: int) -> dict[str, np.ndarray]:
    """Inputs of the vision graph for patches at `patch_positions` int64 [units, patches, 2] of a picture of `down` × `across`
    patches; the table has `side` × `side` entries.

    | name | dtype, shape | meaning |
    |---|---|---|
    | `table_indices` | int64 [units, patches, 4] | entries of the table around each patch |
    | `table_weights` | float32 [units, patches, 4] | how much of each |
    """
    rows, row_weights = _around(patch_positions[..., 0], down, side)
    columns, column_weights = _around(patch_positions[..., 1], across, side)
    shape = (*patch_positions.shape[:-1], 4)
    return {
        "table_indices": (rows[..., :, None] * side + columns[..., None, :]).reshape(shape),
        "table_weights": (row_weights[..., :, None] * column_weights[..., None, :]).reshape(shape),
    }


def _around(index: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The two entries around each of `size` places along one side of the table, and their weights."""
    at = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(at)
    taps = low.astype(np.int64)[..., None] + np.arange(2)
    distance = np.abs(at[..., None] - low[..., None] - np.arange(2, dtype=np.float32))
    return taps.clip(0, side - 1), (1 - distance).clip(0).astype(np.float32)
