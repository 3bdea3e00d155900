"""How a vision tower with windows reads a picture of any size (Qwen2.5-VL, arXiv 2502.13923, section 2.1.1).

Patches are grouped into *units*, the squares that become one row each, and units into windows of a fixed side; windows
at the right and the lower edge hold fewer. Units stand in the order of their windows, each window a run of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Grid:
    """Pixels of a patch's side, patches of a unit's side, frames of a patch, pixels of a window's side."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    window_size: int

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

    @property
    def window_side(self) -> int:
        """Units of a window's side."""
        return max(1, self.window_size // self.unit_size)

    @property
    def window_units(self) -> int:
        """Units of a whole window."""
        return self.window_side**2


def patchified(frames: np.ndarray, grid: Grid) -> np.ndarray:
    """float32 [temporal_patch_size, 3, H, W] → patches [n, patch_values], unit by unit in reading order, as transformers'
    Qwen2-VL processors lay them out."""
    count, colours, height, width = frames.shape
    size, merge = grid.patch_size, grid.merge_size
    down, across = height // grid.unit_size, width // grid.unit_size
    split = frames.reshape(count, colours, down, merge, size, across, merge, size)
    return split.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, grid.patch_values)


def windows(pixels: np.ndarray, down: int, across: int, grid: Grid) -> dict[str, np.ndarray]:
    """Inputs of the vision graph for one picture of `down` × `across` units, or one time step of a video.

    | name | dtype, shape | meaning |
    |---|---|---|
    | `pixel_values` | float32 [units, patches, values] | units in the order of windows |
    | `patch_positions` | int64 [units, patches, 2] | row and column of every patch |
    | `window_units` | int64 [windows, units of a window] | units of every window; 0 where it has fewer |
    | `window_mask` | bool [windows, 1, patches of a window, the same] | what a patch sees: the real ones of its window |
    | `unit_places` | int64 [units] | where a unit stands in the windows, laid out flat |
    | `unit_order` | int64 [units] | the unit that becomes each row of the picture, in reading order |
    """
    side, count, merge = grid.window_side, down * across, grid.merge_size
    padded = np.full((-(-down // side) * side, -(-across // side) * side), -1)
    padded[:down, :across] = np.arange(count).reshape(down, across)
    by_window = padded.reshape(-1, side, padded.shape[1] // side, side).transpose(0, 2, 1, 3)
    by_window = by_window.reshape(-1, grid.window_units)
    order = by_window[by_window >= 0]
    counts = (by_window >= 0).sum(1)
    within = np.arange(grid.window_units)
    visible = within < counts[:, None]
    attended = np.repeat(visible, grid.patches, axis=1)
    starts = np.cumsum(counts) - counts
    reading = np.empty(count, np.int64)
    reading[order] = np.arange(count)
    inside = np.stack(np.divmod(np.arange(grid.patches), merge), -1)
    corners = np.stack(np.divmod(order, across), -1)[:, None] * merge
    return {
        "pixel_values": pixels.reshape(count, grid.patches, -1)[order],
        "patch_positions": (corners + inside).astype(np.int64),
        "window_units": np.where(visible, starts[:, None] + within, 0).astype(np.int64),
        "window_mask": np.repeat(attended[:, None, None], attended.shape[1], axis=2),
        "unit_places": np.flatnonzero(visible).astype(np.int64),
        "unit_order": reading,
    }
