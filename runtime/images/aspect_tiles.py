"""How a tower of one size reads a picture of any size in tiles whose grid has nearly the picture's ratio (InternVL's
"dynamic high resolution", Chen et al., arXiv 2404.16821; transformers' `GotOcr2ImageProcessor`).

The picture is stretched to the grid, without margins, and cut. Behind several tiles stands the whole picture in one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AspectTiling:
    """Pixels of a tile's side, and between how many tiles a grid has."""

    side: int
    min_tiles: int
    max_tiles: int

    @property
    def most_tiles(self) -> int:
        """Tiles of a picture at most, the whole one included."""
        return self.max_tiles + (self.max_tiles > 1)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of the grid whose ratio is nearest to the picture's; transformers' `get_optimal_tiled_canvas`.

        Of grids that are equally near, a later one (with more tiles) is taken where its area is less than twice the
        picture's.
        """
        best, nearest = (1, 1), float("inf")
        for rows, columns in self._grids():
            distance = abs(width / height - columns / rows)
            larger = distance == nearest and width * height > 0.5 * self.side * self.side * columns * rows
            if distance < nearest or larger:
                best, nearest = (rows, columns), distance
        return best

    def tiles(self, height: int, width: int) -> int:
        """Tiles of a picture of this size, the whole one included."""
        rows, columns = self.grid(height, width)
        return rows * columns + (rows * columns > 1)

    def _grids(self) -> list[tuple[int, int]]:
        """(rows, columns) by their number of tiles, then narrow ones first."""
        most = range(1, self.max_tiles + 1)
        grids = [(rows, columns) for columns in most for rows in most]
        allowed = [g for g in grids if self.min_tiles <= g[0] * g[1] <= self.max_tiles]
        return sorted(allowed, key=lambda g: g[0] * g[1])
