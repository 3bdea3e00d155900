"""SigLIP 2's tower for pictures of any size (NaFlex, arXiv 2502.14786), and the pixel unshuffle and the two matrices of LFM2-VL
behind it (arXiv 2511.23404).

A graph reads one picture, or one tile of it: all of its patches see each other, and nothing is padded. The host groups patches into
units, the squares that become one embedding each, and says how much of each row and column of the square table of positions a
patch takes (`runtime/images/naflex.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.families.lfm2_vl import described
from ....runtime.images.naflex import tower_inputs
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.composer import Composer
from ...graphs.weights import WeightStore
from ..common.config_checks import check_common
from ..common.parts import GraphSpec
from .base import Calls, Vision
from .naflex_settings import naflex_image, naflex_of

TOWER, PROJECTOR = "model.vision_tower.", "model.multi_modal_projector."
RANDOM_UNITS = ((2, 3), (3, 2), (1, 5), (4, 1), (2, 2), (5, 2))
"""(rows, columns) of units of random pictures, those that a tower reads at once."""


def _embedded(
    module: Any, pixel_values: torch.Tensor, table_rows: torch.Tensor, table_columns: torch.Tensor
) -> tuple[torch.Tensor]:
    taken = (table_rows[..., :, None] * table_columns[..., None, :]).flatten(-2)
    return (module.patch_embedding(pixel_values) + torch.matmul(taken, module.position_embedding.weight),)


def _layer(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
    return (module(hidden, None),)


def _projected(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
    if module.use_layer_norm:
        hidden = module.layer_norm(hidden)
    return (module.linear_2(module.act(module.linear_1(hidden))),)


class Siglip2Vision(Vision):
    """See the module; `vision_tower` and `multi_modal_projector` of a Lfm2VlForConditionalGeneration."""

    scales: ClassVar[bool] = True

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the language model's hidden states."""
        super().__init__(checkpoint, "text_config")
        config: Any = checkpoint.config
        vision, name = config.vision_config, checkpoint.architecture
        check_common(vision, name)
        if vision.model_type != "siglip2_vision_model":
            raise UnsupportedModelError(
                f"{name} with the vision tower {vision.model_type!r} is not supported, only with 'siglip2_vision_model'"
            )
        if vision.num_channels != 3:
            raise UnsupportedModelError(
                f"{name}: vision_config.num_channels={vision.num_channels!r:.40} is not 3"
            )
        self.table_side = math.isqrt(vision.num_patches)
        if self.table_side**2 != vision.num_patches:
            raise UnsupportedModelError(
                f"{name}: vision_config.num_patches={vision.num_patches} is no square; correct config.json"
            )
        self.naflex = naflex_of(checkpoint.image_settings, checkpoint.max_pixels)
        for own, theirs in (("patch_size", vision.patch_size), ("merge_size", config.downsample_factor)):
            if getattr(self.naflex, own) != theirs:
                raise UnsupportedModelError(
                    f"image processor: {own} {getattr(self.naflex, own)} differs from the {theirs!r:.40} of config.json"
                )
        self.width, self.max_embeds = width, self.naflex.most_units

    @property
    def needed_embeds(self) -> int:
        """See `Vision`; a photograph is cut into tiles."""
        return self.naflex.most_units

    def graph(self, store: WeightStore) -> GraphSpec:
        """Units of patches, and what they take of the table → `image_rows` [units, width]."""
        graph, naflex, side = Composer("vision", store), self.naflex, self.table_side
        calls, patches = Calls(graph, self.checkpoint), naflex.patches
        tower, projector = self.model.model.vision_tower, self.model.model.multi_modal_projector
        shapes: dict[str, tuple[str | int, ...]] = {
            "pixel_values": ("units", patches, 3 * naflex.patch_size**2),
            "table_rows": ("units", patches, side),
            "table_columns": ("units", patches, side),
        }
        given = {name: (graph.input(name, "float32", shape), shape) for name, shape in shapes.items()}
        hidden = calls(tower.embeddings, f"{TOWER}embeddings.", given, _embedded)
        size = tower.config.hidden_size
        hidden = graph.node("Reshape", [hidden, graph.constant(np.array([1, -1, size], np.int64))], "patches")
        shape = (1, "rows", size)
        for i, layer in enumerate(tower.encoder.layers):
            hidden = calls(layer, f"{TOWER}encoder.layers.{i}.", {"hidden": (hidden, shape)}, _layer)
        hidden = calls(tower.post_layernorm, f"{TOWER}post_layernorm.", {"hidden": (hidden, shape)})
        units = graph.constant(np.array([-1, patches * size], np.int64))
        hidden = graph.node("Reshape", [hidden, units], "units")
        rows = calls(projector, PROJECTOR, {"hidden": (hidden, ("units", patches * size))}, _projected)
        graph.output("image_rows", rows, "float32", ("units", self.width))
        return GraphSpec("vision", "vision", graph.model())

    def settings(self) -> dict[str, Any]:
        """See `Vision`."""
        return naflex_image(self.checkpoint.image_settings) | described(self.naflex, self.table_side)

    def random(self, generator: torch.Generator, variant: int = 0) -> tuple[dict[str, torch.Tensor], int]:
        """See `Vision`; one or two crops of different sizes, padded as the model's own processor pads them."""
        naflex, most = self.naflex, self.naflex.largest_run
        known = [size for size in RANDOM_UNITS if size[0] * size[1] <= most] or [(1, 1)]
        number = variant % len(known)
        sizes = [known[number], known[-1 - number]][: 1 + variant % 2]
        most, values = max(down * across for down, across in sizes) * naflex.patches, 3 * naflex.patch_size**2
        pixels = torch.zeros(len(sizes), most, values)
        mask = torch.zeros(len(sizes), most, dtype=torch.int32)
        shapes = torch.tensor(sizes) * naflex.merge_size
        for number, count in enumerate(shapes.prod(1).tolist()):
            pixels[number, :count] = torch.randn(count, values, generator=generator)
            mask[number, :count] = 1
        vision = {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
        return vision, sum(down * across for down, across in sizes)

    def runs(self, tensors: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """See `Vision`; of every crop the patches that are no padding."""
        found = []
        for pixels, (down, across) in zip(
            tensors["pixel_values"], tensors["spatial_shapes"].tolist(), strict=True
        ):
            own = pixels[: down * across]
            found.append(tower_inputs(own, down, across, self.naflex.merge_size, self.table_side))
        return found

    def output(self, model: Any) -> nn.Module:
        """The model itself: its projector reads one crop after the other."""
        return model

    def read_embeds(self, output: Any) -> torch.Tensor:
        """See `Vision`."""
        return output.image_hidden_states
