"""CLIP's tower over the tiles of one picture, with LLaVA-NeXT's order of embeddings (Liu et al., LLaVA-1.6, 2024).

Which embedding of which tile goes where depends on the picture's size alone: the host says it by one index
(`runtime/images/tiles.py`), and the graph holds one gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import embedding
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.images.tiles import Tiling
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.composer import Composer
from ...graphs.weights import WeightStore
from ..common.parts import GraphSpec
from .base import Calls
from .clip import ClipVision
from .tile_settings import canvas_list, tiled_image

RANDOM_SIZES = ((1.05, 1.9), (0.6, 2.0), (1.9, 1.05), (1.5, 2.2), (0.9, 6.3), (2.8, 0.6), (2.0, 2.0))
"""(height, width) of random pictures, in tiles."""


class _Lines(nn.Module):
    """The embedding that ends a line of a picture, as a module whose parameter has the name that it has in the model."""

    def __init__(self, image_newline: nn.Parameter) -> None:
        super().__init__()
        self.image_newline = image_newline


def _ordered(module: Any, hidden: torch.Tensor, row_index: torch.Tensor) -> tuple[torch.Tensor]:
    image_embeds = torch.cat([hidden.reshape(-1, hidden.shape[-1]), module.image_newline[None]])
    return (embedding(row_index, image_embeds),)


class ClipTilesVision(ClipVision):
    """See the module; `vision_tower`, `multi_modal_projector` and `image_newline` of a
    LlavaNextForConditionalGeneration."""

    pictures: ClassVar[str] = "tiles"

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the language model's hidden states."""
        super().__init__(checkpoint, width)
        config, name = checkpoint.config, checkpoint.architecture
        if self._whole:
            raise UnsupportedModelError(
                f"{name}: vision_feature_select_strategy='full' is not supported, only 'default': transformers cannot lay "
                "out the rows of CLIP's whole states"
            )
        sizes = {part: getattr(config.vision_config, part) for part in ("image_size", "patch_size")}
        for part, size in sizes.items():
            if type(size) is not int:
                raise UnsupportedModelError(f"{name}: vision_config.{part}={size!r:.80} is not one number")
        assert self.num_embeds is not None
        self._tile_rows, self.num_embeds = self.num_embeds, None
        side = self.side[0]
        canvases = canvas_list(config.image_grid_pinpoints, side, name)
        self.tiling = Tiling(side, side // sizes["patch_size"], canvases)
        self.max_embeds = self.tiling.most_rows

    @property
    def needed_embeds(self) -> int:
        """See `Vision`; a picture as large as a canvas."""
        return self.tiling.most_rows

    def graph(self, store: WeightStore) -> GraphSpec:
        """`pixel_values` [tiles, 3, side, side] and `row_index` [rows] → `image_rows` [rows, width]."""
        graph = Composer("vision", store)
        calls = Calls(graph, self.checkpoint)
        pixels = graph.input("pixel_values", "float32", (self.pictures, 3, *self.side))
        index = graph.input("row_index", "int64", ("rows",))
        hidden = self.compose(calls, pixels)
        given = {
            "hidden": (hidden, (self.pictures, self._tile_rows, self.width)),
            "row_index": (index, ("rows",)),
        }
        num_embeds = calls(_Lines(self.model.model.image_newline), "model.", given, _ordered)
        graph.output("image_rows", num_embeds, "float32", ("rows", self.width))
        return GraphSpec("vision", "vision", graph.model())

    def settings(self) -> dict[str, Any]:
        """LLaVA-NeXT's processor."""
        settings = self.checkpoint.image_settings
        described = tiled_image(settings, self.tiling, "llava-next", LlavaNextImageProcessorPil)
        return {**described, "patch_size": self.config.vision_config.patch_size}

    def tensors(self, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `ClipVision`; tiles [n, 3, side, side] of all pictures, one after the other, without those that only make
        pictures equally long."""
        sizes = made["image_sizes"].tolist()
        tiles = [
            picture[: self.tiling.tiles(*size)]
            for picture, size in zip(made["pixel_values"], sizes, strict=True)
        ]
        return {"pixel_values": torch.cat(tiles), "image_sizes": made["image_sizes"]}

    def random(self, generator: torch.Generator, variant: int = 0) -> tuple[dict[str, torch.Tensor], int]:
        """See `Vision`; pictures whose canvases have margins, and some that have none."""
        side = self.tiling.side
        down, across = RANDOM_SIZES[variant % len(RANDOM_SIZES)]
        size = (round(side * down), round(side * across))
        pixels = torch.randn(self.tiling.tiles(*size), 3, side, side, generator=generator)
        count = len(self.tiling.row_index(*size))
        return {"pixel_values": pixels, "image_sizes": torch.tensor([size])}, count

    def runs(self, tensors: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """See `Vision`."""
        runs, start = [], 0
        for size in tensors["image_sizes"].tolist():
            end = start + self.tiling.tiles(*size)
            pixels = tensors["pixel_values"][start:end]
            runs.append({"pixel_values": pixels, "row_index": self.tiling.row_index(*size)})
            start = end
        return runs

    def output(self, model: Any) -> nn.Module:
        """The model without its head: no module of its own puts embeddings into order."""
        return model.model

    def read_embeds(self, output: Any) -> torch.Tensor:
        """See `Vision`."""
        return output.image_hidden_states
