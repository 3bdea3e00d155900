"""How a tower reads pictures at nearly their own size and ratio (SigLIP 2's NaFlex, Tschannen et al., arXiv 2502.14786), large
ones in tiles behind which the whole one stands once more (LFM2-VL, arXiv 2511.23404; transformers' `Lfm2VlImageProcessor`).

Patches are grouped into *units*, the squares that become one embedding each, in reading order.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from ..common.errors import ImageError

Size = tuple[int, int]
"""(height, width)."""


@dataclass(frozen=True)
class Naflex:
    """Pixels of a patch's side, patches of a unit's side, pixels of a tile's side; how many tiles a large picture has, at least
    and at most, and whether the whole one follows them; how many units a picture has that is not cut; and how many times the
    most of these one must have to be cut."""

    patch_size: int
    merge_size: int
    tile_size: int
    min_tiles: int
    max_tiles: int
    thumbnail: bool
    min_units: int
    max_units: int
    tolerance: float

    @property
    def unit_size(self) -> int:
        """Pixels of a unit's side."""
        return self.patch_size * self.merge_size

    @property
    def patches(self) -> int:
        """Patches of a unit."""
        return self.merge_size**2

    @property
    def tile_units(self) -> int:
        """Units of a tile."""
        return (self.tile_size // self.unit_size) ** 2

    @property
    def most_units(self) -> int:
        """Units of a picture at most, those of all its tiles and of the whole one."""
        if self.max_tiles == 1:
            return self.max_units
        return max(self.max_units, self.max_tiles * self.tile_units + self.thumbnail * self.max_units)

    @property
    def largest_run(self) -> int:
        """Units that the tower reads at once, at most."""
        return max(self.max_units, self.tile_units if self.max_tiles > 1 else 0)

    def whole(self, height: int, width: int) -> Size:
        """Pixels that the whole picture is resized to: whole units, the ratio nearly kept. Raises `ImageError` for a picture
        so slim that one unit across makes too many of them."""
        unit = self.unit_size
        least, most = self.min_units * unit**2, self.max_units * unit**2
        down, across = (max(unit, round(side / unit) * unit) for side in (height, width))
        if down * across > most:
            shrink = math.sqrt(height * width / most)
            down, across = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        elif down * across < least:
            grow = math.sqrt(least / (height * width))
            down, across = (math.ceil(side * grow / unit) * unit for side in (height, width))
        if down * across > most:
            raise ImageError(
                f"a picture of {width} x {height} is too slim for this model: it would have "
                f"{down * across // unit**2} units of {unit} x {unit} pixels, and {self.max_units} are the most; cut it"
            )
        return down, across

    def grid(self, height: int, width: int) -> Size:
        """(rows, columns) of the tiles that a picture is cut into; (1, 1): it is not."""
        unit = self.unit_size
        # Transformers takes the side of a patch for the least here, and that of a unit where the picture is resized.
        down, across = (max(self.patch_size, round(side / unit) * unit) for side in (height, width))
        if self.max_tiles == 1 or down * across <= self.max_units * unit**2 * self.tolerance:
            return 1, 1
        best, nearest = (1, 1), float("inf")
        for columns, rows in _grids(self.min_tiles, self.max_tiles):
            distance = abs(width / height - columns / rows)
            larger = distance == nearest and width * height > 0.5 * self.tile_size**2 * columns * rows
            if distance < nearest or larger:
                best, nearest = (rows, columns), distance
        return best

    def units(self, size: Size) -> int:
        """Units of so many pixels."""
        return size[0] * size[1] // self.unit_size**2


@functools.cache
def _grids(least: int, most: int) -> list[Size]:
    """(columns, rows) by their number of tiles. Of those with as many the order is a set's, as transformers has it: it
    decides where a picture's ratio lies in the middle between two."""
    sides = range(1, most + 1)
    found = {
        (columns, rows)
        for count in range(least, most + 1)
        for columns in sides[:count]
        for rows in sides[:count]
        if least <= columns * rows <= most
    }
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def tower_inputs(patches: np.ndarray, down: int, across: int, merge: int, side: int) -> dict[str, np.ndarray]:
    """Inputs of the vision graph for `down` × `across` patches float32 [n, values] in reading order; the tower's table of
    positions has `side` × `side` entries.

    | name | dtype, shape | meaning |
    |---|---|---|
    | `pixel_values` | float32 [units, patches, values] | units in reading order |
    | `table_rows`, `table_columns` | float32 [units, patches, side] | how much of each row and column of the table a patch takes |
    """

    def by_unit(values: np.ndarray) -> np.ndarray:
        """[down, across, n] → [units, patches, n]."""
        split = values.reshape(down // merge, merge, across // merge, merge, -1).transpose(0, 2, 1, 3, 4)
        return np.ascontiguousarray(split).reshape(down * across // merge**2, merge**2, -1)

    rows, columns = antialiased_weights(side, down), antialiased_weights(side, across)
    return {
        "pixel_values": by_unit(patches.reshape(down, across, -1)),
        "table_rows": by_unit(np.broadcast_to(rows[:, None], (down, across, side))),
        "table_columns": by_unit(np.broadcast_to(columns, (down, across, side))),
    }


@functools.lru_cache(maxsize=256)
def antialiased_weights(have: int, make: int) -> np.ndarray:
    """float32 [make, have]: how much of each of `have` entries along one side each of `make` places takes, when a table is
    resampled bilinearly with antialiasing, as torch's `interpolate` does; in float32 throughout."""
    f = np.float32
    scale = f(have) / f(make)
    support = max(scale, f(1))
    weights = np.zeros((make, have), f)
    for place in range(make):
        centre = scale * (f(place) + f(0.5))
        first = max(int(centre - support + f(0.5)), 0)
        last = min(int(centre + support + f(0.5)), have)
        at = (np.arange(last - first, dtype=f) + f(first) - centre + f(0.5)) * (f(1) / support)
        own = np.maximum(f(1) - np.abs(at), f(0))
        weights[place, first:last] = own / np.add.accumulate(own)[-1]
    return weights
