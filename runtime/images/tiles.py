"""How a tower of one size reads a picture of any size: whole at low resolution, and cut into tiles (LLaVA-NeXT's
"AnyRes").

A picture is fitted into one of several *canvases*, whose sides are whole tiles, and centred there. Its embeddings are
those of the whole picture, then those of the canvas in reading order, without the rows and columns that hold only
padding, and with a row of its own behind every line of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tiling:
    """Pixels of a tile's side, rows that it has along a side, and the canvases as (height, width) in pixels. Where two
    canvases are as good as each other the first one is taken."""

    side: int
    grid: int
    canvases: tuple[tuple[int, int], ...]

    @property
    def most_tiles(self) -> int:
        """Tiles of the largest picture, the whole one included."""
        return 1 + max(height * width for height, width in self.canvases) // self.side**2

    @property
    def most_rows(self) -> int:
        """Rows of the picture with the most of them: one that fills its canvas."""
        lines = [(height // self.side * self.grid, width // self.side) for height, width in self.canvases]
        return self.grid**2 + max(count * (across * self.grid + 1) for count, across in lines)

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the canvas for a picture: it keeps most of the picture's pixels, then wastes fewest of its
        own; transformers' `select_best_resolution`."""
        best, score = self.canvases[0], (-1, 0)
        for down, across in self.canvases:
            scale = min(across / width, down / height)
            pixels = min(int(width * scale) * int(height * scale), height * width)
            if (pixels, pixels - down * across) > score:
                best, score = (down, across), (pixels, pixels - down * across)
        return best

    def tiles(self, height: int, width: int) -> int:
        """Tiles of a picture, the whole one included."""
        down, across = self.canvas(height, width)
        return 1 + (down // self.side) * (across // self.side)

    def row_index(self, height: int, width: int) -> np.ndarray:
        """int64 [num_embeds]: which embedding of all tiles, one after the other and with the one that ends a line
        behind them, becomes each embedding of a picture; transformers' `pack_image_features` and `unpad_image`."""
        canvas, each = self.canvas(height, width), self.grid**2
        down, across = (length // self.side for length in canvas)
        end = (1 + down * across) * each
        places = np.arange(each, end).reshape(down, across, self.grid, self.grid)
        lines = places.transpose(0, 2, 1, 3).reshape(down * self.grid, across * self.grid)
        high, wide = lines.shape
        if width / height > wide / high:
            unused = (high - int(round(height * (wide / width), 7))) // 2
            lines = lines[unused : high - unused]
        else:
            unused = (wide - int(round(width * (high / height), 7))) // 2
            lines = lines[:, unused : wide - unused]
        ended = np.concatenate([lines, np.full((len(lines), 1), end)], axis=1)
        return np.concatenate([np.arange(each), ended.reshape(-1)]).astype(np.int64)
