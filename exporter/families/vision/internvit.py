"""InternViT with InternVL's projector (Chen et al., arXiv 2312.14238 and 2404.16821): a ViT with scaled layers over the tiles
of one picture; four neighbouring hidden states become one embedding."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.modeling_internvl import InternVLModel, InternVLVisionRMSNorm

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.images.aspect_tiles import AspectTiling
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.composer import Composer
from ...graphs.hooks import export_hooks
from ...graphs.weights import WeightStore
from ..common.config_checks import check_common
from ..common.parts import GraphSpec
from .aspect_tile_settings import aspect_tiled_image
from .base import Calls, Vision, pair

RANDOM_TILES = (3, 1, 5, 7, 2)
"""Tiles of random pictures, the whole one included."""

RATIOS = (1.0, 0.5, 0.25)
"""`downsample_ratio` of a side, of which the reference computes sizes without rounding."""


class InternViTVision(Vision):
    """See the module; the `vision_tower` and `multi_modal_projector` of an InternVLForConditionalGeneration."""

    scales: ClassVar[bool] = True

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the language model's hidden states."""
        super().__init__(checkpoint, "text_config")
        config: Any = checkpoint.config
        vision, name = config.vision_config, checkpoint.architecture
        if vision.model_type != "internvl_vision":
            raise UnsupportedModelError(
                f"{name} with the vision tower {vision.model_type!r} is not supported, only with 'internvl_vision'"
            )
        check_common(vision, name)
        self.used = _used_layers(config, name)
        self.side, self._grid = _square(config, name)
        self.image_seq_length, self.width = self._tile_embeds(name), width
        self.tiling = AspectTiling(
            self.side[0], *(self.settings()[key] for key in ("min_patches", "max_patches"))
        )
        self.max_embeds = self.tiling.most_tiles * self.image_seq_length

    def _tile_embeds(self, name: str) -> int:
        """How many embeddings a tile becomes; its processor must write as many."""
        each = round(self._grid * self.config.downsample_ratio) ** 2
        for owner, said in (
            ("config.json", self.config.image_seq_length),
            ("processor_config.json", self.checkpoint.processor_settings.get("image_seq_length", 256)),
        ):
            if said != each:
                raise UnsupportedModelError(
                    f"{name}: {owner} says image_seq_length={said!r:.40}, but a tile becomes {each} embeddings; correct it"
                )
        return each

    @property
    def needed_embeds(self) -> int:
        """See `Vision`: a picture of 4 to 3 has as many tiles as there can be, however small it is."""
        assert self.max_embeds is not None
        return self.max_embeds

    def hooks(self) -> AbstractContextManager[None]:
        """RMS norms, where the tower has them, become one operator each."""
        return export_hooks(rms_norms=(InternVLVisionRMSNorm,))

    def graph(self, store: WeightStore) -> GraphSpec:
        """`pixel_values` [tiles, 3, side, side] → `image_rows` [tiles, rows of a tile, width]."""
        graph = Composer("vision", store)
        pixels = graph.input("pixel_values", "float32", ("tiles", 3, *self.side))
        image_embeds = self.compose(Calls(graph, self.checkpoint), pixels)
        graph.output("image_rows", image_embeds, "float32", ("tiles", self.image_seq_length, self.width))
        return GraphSpec("vision", "vision", graph.model())

    def compose(self, calls: Calls, pixels: ir.Value) -> ir.Value:
        """Patches, layers, the norm behind the last one, then squares of hidden states through the projector."""
        tower, path = self.model.model.vision_tower, "model.vision_tower."
        grid, ratio = self._grid, self.config.downsample_ratio
        shape = ("tiles", grid * grid + 1, self.config.vision_config.hidden_size)
        hidden = calls(
            tower.embeddings, f"{path}embeddings.", {"pixel_values": (pixels, ("tiles", 3, *self.side))}
        )
        for i, layer in enumerate(tower.encoder.layer[: self.used]):
            hidden = calls(layer, f"{path}encoder.layer.{i}.", {"hidden": (hidden, shape)})
        if self.config.vision_feature_layer == -1 and not isinstance(tower.layernorm, nn.Identity):
            hidden = calls(tower.layernorm, f"{path}layernorm.", {"hidden": (hidden, shape)})

        def projected(projector: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
            squares = hidden[:, 1:].reshape(-1, grid, grid, hidden.shape[-1])
            joined = InternVLModel.pixel_shuffle(projector, squares, ratio)
            return (projector(joined.flatten(1, 2)),)

        projector = self.model.model.multi_modal_projector
        return calls(projector, "model.multi_modal_projector.", {"hidden": (hidden, shape)}, projected)

    def settings(self) -> dict[str, Any]:
        """GotOcr2's processor; InternVL's own always asks it for tiles."""
        described = aspect_tiled_image(
            self.checkpoint.image_settings,
            self.side,
            "got-ocr2",
            GotOcr2ImageProcessorPil,
            self.checkpoint.max_pixels,
        )
        return {**described, "image_seq_length": self.image_seq_length}

    def random(self, generator: torch.Generator, variant: int = 0) -> tuple[dict[str, torch.Tensor], int]:
        """See `Vision`."""
        tiles = min(RANDOM_TILES[variant % len(RANDOM_TILES)], self.tiling.most_tiles)
        pixels = torch.randn(tiles, 3, *self.side, generator=generator)
        return {"pixel_values": pixels}, tiles * self.image_seq_length

    def runs(self, tensors: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """See `Vision`; all tiles in one run, since nothing says whose they are."""
        return [dict(tensors)]

    def output(self, model: Any) -> nn.Module:
        """The projector."""
        return model.model.multi_modal_projector


def _used_layers(config: Any, name: str) -> int:
    """Layers of the tower that the embeddings pass."""
    layer, layers = config.vision_feature_layer, config.vision_config.num_hidden_layers
    # transformers reads no state of layer 0: it takes the number for "no layer".
    if type(layer) is not int or layer == 0 or not -layers - 1 <= layer <= layers:
        raise UnsupportedModelError(
            f"{name}: vision_feature_layer={layer!r:.80} is not supported, only one of 1..{layers} or -{layers + 1}..-1"
        )
    if config.vision_feature_select_strategy != "default":
        raise UnsupportedModelError(
            f"{name}: vision_feature_select_strategy={config.vision_feature_select_strategy!r:.40} is not supported, only "
            "'default': with the class token, states are no square"
        )
    return layer if layer > 0 else layers + 1 + layer


def _square(config: Any, name: str) -> tuple[tuple[int, int], int]:
    """((height, width) of a tile, patches along a side), where pixel shuffle fits."""
    side, patch = (pair(getattr(config.vision_config, part)) for part in ("image_size", "patch_size"))
    if side[0] != side[1] or patch[0] != patch[1] or not 1 <= patch[0] <= side[0]:
        raise UnsupportedModelError(
            f"{name}: image_size {list(side)} in patches of {list(patch)} is not supported, only squares"
        )
    grid, ratio = side[0] // patch[0], config.downsample_ratio
    if ratio not in RATIOS or grid * ratio != int(grid * ratio):
        raise UnsupportedModelError(
            f"{name}: downsample_ratio={ratio!r:.40} is not supported for {grid} x {grid} patches, only "
            f"{', '.join(map(str, RATIOS))} that give whole numbers"
        )
    return side, grid
