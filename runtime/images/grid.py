"""How pictures and frames of any size are cut into patches (Qwen2-VL, arXiv 2409.12191, section 2.1).

Patches are grouped into *units*, the squares that become one embedding each, in reading order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Grid:
    """Pixels of a patch's side, patches of a unit's side, frames of a patch."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int

    @property
    def patches(self) -> int:
        """Patches of a unit."""
        return self.merge_size**2

    @property
    def unit_size(self) -> int:
        """Pixels of a unit's side."""
        return self.patch_size * self.merge_size

    @property
    def unit_pixels(self) -> int:
        """Pixels of a unit."""
        return self.unit_size**2

    @property
    def patch_values(self) -> int:
        """Numbers that describe a patch: colours, frames, pixels."""
        return 3 * self.temporal_patch_size * self.patch_size**2


def patchified(frames: np.ndarray, grid: Grid) -> np.ndarray:
    """float32 [temporal_patch_size, 3, H, W] → patches [n, patch_values], unit by unit in reading order, as transformers'
    Qwen2-VL processors lay them out."""
    count, colours, height, width = frames.shape
    size, merge = grid.patch_size, grid.merge_size
    down, across = height // grid.unit_size, width // grid.unit_size
    split = frames.reshape(count, colours, down, merge, size, across, merge, size)
    return split.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, grid.patch_values)


def units(pixels: np.ndarray, down: int, across: int, grid: Grid) -> dict[str, np.ndarray]:
    """Inputs of a vision graph for one picture of `down` × `across` units, or one time step of a video.

    | name | dtype, shape | meaning |
    |---|---|---|
    | `pixel_values` | float32 [units, patches, values] | units in reading order |
    | `patch_positions` | int64 [units, patches, 2] | row and column of every patch |
    """
    count, merge = down * across, grid.merge_size
    inside = np.stack(np.divmod(np.arange(grid.patches), merge), -1)
    corners = np.stack(np.divmod(np.arange(count), across), -1)[:, None] * merge
    return {
        "pixel_values": pixels.reshape(count, grid.patches, -1),
        "patch_positions": (corners + inside).astype(np.int64),
    }
