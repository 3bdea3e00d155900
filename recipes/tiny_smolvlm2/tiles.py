"""How ``tiny-smolvlm2`` sees a picture: nine tiles in reading order and the whole picture in one, each of 32 pixels.

An object is 15 to 21 pixels wide in the tiles, and 5 to 7 in the whole picture: there its colour and its place are seen, but hardly
its kind or a stripe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from ..common.captioner import to_pixels
from .tokenizer import AROUND, GLOBAL, IMAGE

TILE = 32  # pixels
ACROSS = 3  # tiles
SIDE = ACROSS * TILE
PATCH = 8  # pixels
SCALE = 2  # of the pixel shuffle: patches that become a row, down and across
ROWS_ACROSS = TILE // PATCH // SCALE
TILE_ROWS = ROWS_ACROSS**2
TILES = ACROSS**2 + 1
GRID = SIDE // PATCH
"""Patches of a picture's side in its tiles."""
MEAN = STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Tiling:
    """A way to show a picture: in so many tiles across and down and as a whole, or with 0 as a whole alone."""

    across: int

    @property
    def stored(self) -> slice:
        """Which of a picture's stored rows are seen; those of the whole come last."""
        return slice(0, None) if self.across else slice(-TILE_ROWS, None)

    @property
    def text(self) -> str:
        """What a picture becomes in a prompt."""
        return get_image_prompt_string(
            self.across, self.across, TILE_ROWS,
            fake_token_around_image=AROUND, image_token=IMAGE, global_image_token=GLOBAL,
        )  # fmt: skip


TILED, WHOLE = Tiling(ACROSS), Tiling(0)


def cut(pictures: np.ndarray) -> np.ndarray:
    """uint8 (B, 96, 96, 3) to tiles uint8 (B, 10, 32, 32, 3), the whole picture last, as the processor cuts and resizes."""
    tiles = pictures.reshape(-1, ACROSS, TILE, ACROSS, TILE, 3).transpose(0, 1, 3, 2, 4, 5)
    wholes = [
        np.asarray(Image.fromarray(picture).resize((TILE, TILE), Image.Resampling.BICUBIC))
        for picture in pictures
    ]
    return np.concatenate([tiles.reshape(-1, ACROSS**2, TILE, TILE, 3), np.stack(wholes)[:, None]], 1)


def pixels_of(pictures: np.ndarray) -> Tensor:
    """Pixels float32 [B, 10, 3, 32, 32] of pictures uint8 (B, 96, 96, 3), as the processor gives them."""
    tiles = cut(pictures)
    return to_pixels(tiles.reshape(-1, *tiles.shape[2:]), MEAN, STD).unflatten(0, tiles.shape[:2])


def by_row(cells: Tensor) -> Tensor:
    """What is known of every patch of a picture, in reading order [B, 144, …], in the order of the tiles' rows and of the patches
    within each: [B, 36, 4, …]."""
    parts = (ACROSS, ROWS_ACROSS, SCALE)
    laid = cells.unflatten(1, (*parts, *parts))
    return laid.permute(0, 1, 4, 2, 5, 3, 6, *range(7, laid.dim())).flatten(1, 4).flatten(2, 3)


def encode(model: Any, pixels: Tensor) -> Tensor:
    """Rows [B, tiles * 4, width] of pixels [B, tiles, 3, 32, 32]: tower and connector, every tile by itself."""
    hidden = model.vision_model(pixel_values=pixels.flatten(0, 1)).last_hidden_state
    return model.connector(hidden).unflatten(0, pixels.shape[:2]).flatten(1, 2)
