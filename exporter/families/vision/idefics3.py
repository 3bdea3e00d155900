"""SigLIP over the tiles of a picture, with the pixel shuffle and the one matrix of Idefics 3 and SmolVLM (arXiv 2408.12637,
2504.05299)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.models.idefics3 import modeling_idefics3
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm import modeling_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.composer import Composer
from ...graphs.weights import WeightStore
from ..common.config_checks import check_common
from ..common.parts import GraphSpec
from .base import Calls, Vision
from .siglip import siglip_states, square_patches
from .split_settings import frames_in_tiles, split_image, splitting_of

_CLASSES: dict[str, tuple[Any, Any]] = {
    "idefics3": (modeling_idefics3.Idefics3VisionEmbeddings, Idefics3ImageProcessorPil),
    "smolvlm": (modeling_smolvlm.SmolVLMVisionEmbeddings, SmolVLMImageProcessorPil),
}
"""Type of a model → what looks patches' positions up, and its image processor."""


class Idefics3Vision(Vision):
    """See the module; `vision_model` and `connector` of an Idefics3- or SmolVLMForConditionalGeneration. Every tile is a run of
    the graph."""

    scales = True

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the language model's hidden states."""
        super().__init__(checkpoint, "text_config")
        config: Any = checkpoint.config
        vision, name = config.vision_config, checkpoint.architecture
        check_common(vision, name)
        if vision.num_channels != 3:
            raise UnsupportedModelError(
                f"{name}: vision_config.num_channels={vision.num_channels!r:.40} is not 3"
            )
        across, scale = square_patches(vision, name), config.scale_factor
        if type(scale) is not int or scale < 1 or across % scale:
            raise UnsupportedModelError(
                f"{name}: scale_factor={scale!r:.40} does not divide the {across} patches along a side"
            )
        embeddings, self._processor = _CLASSES[config.model_type]
        check_positions(embeddings, vision, across, name)
        self.width, self.tile_embeds = width, (across // scale) ** 2
        self.splitting = splitting_of(self._image())
        self.max_embeds = self.splitting.most_embeds

    @property
    def needed_embeds(self) -> int:
        """See `Vision`; a square picture."""
        return self.splitting.most_embeds

    def graph(self, store: WeightStore) -> GraphSpec:
        """`pixel_values` [batch, 3, side, side] → `image_rows` [batch, rows of a tile, width]."""
        graph, side = Composer("vision", store), self.splitting.side
        calls = Calls(graph, self.checkpoint)
        pixels = graph.input("pixel_values", "float32", ("batch", 3, side, side))
        tower, connector = self.model.model.vision_model, self.model.model.connector
        hidden = siglip_states(calls, tower, "model.vision_model.", pixels, "batch")
        shape = ("batch", tower.embeddings.num_positions, tower.config.hidden_size)
        image_embeds = calls(connector, "model.connector.", {"hidden": (hidden, shape)})
        graph.output("image_rows", image_embeds, "float32", ("batch", self.tile_embeds, self.width))
        return GraphSpec("vision", "vision", graph.model())

    def settings(self) -> dict[str, Any]:
        """The processor's of the model, and how it reads videos."""
        image = self._image()
        settings = self.checkpoint.video_settings or self.checkpoint.image_settings
        video = None
        if self.config.model_type == "smolvlm":
            video = frames_in_tiles(settings, image, self.config.image_token_id)
        return image if video is None else {**image, "video": video}

    def _image(self) -> dict[str, Any]:
        vision, most = self.config.vision_config, self.checkpoint.max_pixels
        settings = self.checkpoint.image_settings
        return split_image(settings, vision.image_size, self.tile_embeds, self._processor, most)

    def random(self, generator: torch.Generator, variant: int = 0) -> tuple[dict[str, torch.Tensor], int]:
        """See `Vision`; 1, 3, 5, … tiles."""
        side, tiles = self.splitting.side, min(1 + 2 * variant, self.splitting.most_tiles)
        return {
            "pixel_values": torch.randn(tiles, 1, 3, side, side, generator=generator)
        }, tiles * self.tile_embeds

    def runs(self, tensors: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """See `Vision`; of `pixel_values` [tiles, 1, 3, side, side], each as a picture of one tile: so those of pictures with
        different numbers of them lie in one batch without the empty ones that transformers' processor fills up with."""
        return [{"pixel_values": tile} for tile in tensors["pixel_values"]]

    def output(self, model: Any) -> nn.Module:
        """The connector."""
        return model.model.connector


def check_positions(embeddings: Any, config: Any, across: int, architecture: str) -> None:
    """The model finds the position of a patch by its place as a fraction, with rounding. Raises UnsupportedModelError where
    that is not its number: the graph looks nothing up."""
    small = copy.deepcopy(config)
    small.hidden_size, small.image_size, small.patch_size = 1, across, 1
    module = embeddings(small).eval()
    with torch.no_grad():
        module.patch_embedding.weight.zero_()
        module.patch_embedding.bias.zero_()
        module.position_embedding.weight.copy_(torch.arange(across**2)[:, None])
        mask = torch.ones(1, across, across, dtype=torch.bool)
        found = module(torch.zeros(1, small.num_channels, across, across), patch_attention_mask=mask)
    if found.flatten().tolist() != list(range(across**2)):
        raise UnsupportedModelError(
            f"{architecture}: vision_config.image_size={config.image_size} has {across} patches along a side, which "
            "transformers rounds to other positions than their own"
        )
