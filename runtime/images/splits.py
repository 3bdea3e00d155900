"""How a picture is cut into tiles that fill it, and seen as a whole besides (Idefics 3, arXiv 2408.12637, section 3.2).

A picture is resized to a longest side, up or down; then to whole tiles, its ratio nearly kept. Where it has more than one
tile they are seen in reading order, and behind them the whole picture in one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LARGEST = 4096
"""No side of a picture is resized beyond this."""


@dataclass(frozen=True)
class Splitting:
    """Pixels of a tile's side, pixels that the longest side of a picture is resized to, whether it is cut into tiles, and
    embeddings of a tile."""

    side: int
    longest: int
    tiled: bool
    tile_embeds: int

    @property
    def most_tiles(self) -> int:
        """Tiles of the largest picture, a square one, the whole one included."""
        return self.tiles_of(*self.tiles(self.longest, self.longest))

    @property
    def most_embeds(self) -> int:
        """Embeddings of the largest picture."""
        return self.most_tiles * self.tile_embeds

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) with the longest side as long as it shall be; the other one is even, or 1. Transformers'
        `get_resize_output_image_size`."""
        ratio = width / height
        if width >= height:
            width, height = self.longest, _even(int(self.longest / ratio))
        else:
            width, height = _even(int(self.longest * ratio)), self.longest
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > LARGEST:
            width, height = LARGEST, int(LARGEST / ratio)
        elif height > width and height > LARGEST:
            width, height = int(LARGEST * ratio), LARGEST
        return max(height, 1), max(width, 1)

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in whole tiles of a picture that is resized already. Transformers'
        `resize_for_vision_encoder`."""
        if not self.tiled:
            return self.side, self.side
        ratio = width / height
        if width >= height:
            width = self._whole(width)
            height = self._whole(int(width / ratio))
        else:
            height = self._whole(height)
            width = self._whole(int(height * ratio))
        return height, width

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles of a picture; (0, 0) where it is seen in one."""
        down, across = (length // self.side for length in self.canvas(*self.resized(height, width)))
        return (0, 0) if (down, across) == (1, 1) else (down, across)

    @staticmethod
    def tiles_of(down: int, across: int) -> int:
        """How many there are, the whole picture included."""
        return down * across + 1

    def of_frames(self, longest: int) -> Splitting:
        """How frames of a video are seen: in one tile, their `longest` side made so long before."""
        return replace(self, longest=longest, tiled=False)

    def _whole(self, length: int) -> int:
        return math.ceil(length / self.side) * self.side


def _even(length: int) -> int:
    return length + length % 2
