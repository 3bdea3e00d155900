"""How a vision tower with windows reads a picture of any size (Qwen2.5-VL, arXiv 2502.13923, section 2.1.1).

Units are grouped into windows of a fixed side; windows at the right and the lower edge hold fewer. Units stand in the order of
their windows, each window a run of them.
"""

from __future__ import annotations

import numpy as np

from .grid import Grid, units


def window_side(window_size: int, grid: Grid) -> int:
    """Units of the side of a window of `window_size` pixels."""
    return max(1, window_size // grid.unit_size)


def windows(
    pixels: np.ndarray, down: int, across: int, grid: Grid, window_size: int
) -> dict[str, np.ndarray]:
    """Inputs of the vision graph for one picture of `down` × `across` units, or one time step of a video: those of `units`
    in the order of windows, and

    | name | dtype, shape | meaning |
    |---|---|---|
    | `window_units` | int64 [windows, units of a window] | units of every window; 0 where it has fewer |
    | `window_mask` | bool [windows, 1, patches of a window, the same] | what a patch sees: the real ones of its window |
    | `unit_places` | int64 [units] | where a unit stands in the windows, laid out flat |
    | `unit_order` | int64 [units] | the unit that becomes each row of the picture, in reading order |
    """
    side, count = window_side(window_size, grid), down * across
    padded = np.full((-(-down // side) * side, -(-across // side) * side), -1)
    padded[:down, :across] = np.arange(count).reshape(down, across)
    by_window = padded.reshape(-1, side, padded.shape[1] // side, side).transpose(0, 2, 1, 3)
    by_window = by_window.reshape(-1, side**2)
    order = by_window[by_window >= 0]
    counts = (by_window >= 0).sum(1)
    within = np.arange(side**2)
    visible = within < counts[:, None]
    attended = np.repeat(visible, grid.patches, axis=1)
    starts = np.cumsum(counts) - counts
    reading = np.empty(count, np.int64)
    reading[order] = np.arange(count)
    return {
        **{name: values[order] for name, values in units(pixels, down, across, grid).items()},
        "window_units": np.where(visible, starts[:, None] + within, 0).astype(np.int64),
        "window_mask": np.repeat(attended[:, None, None], attended.shape[1], axis=2),
        "unit_places": np.flatnonzero(visible).astype(np.int64),
        "unit_order": reading,
    }
