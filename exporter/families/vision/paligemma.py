"""SigLIP's tower with PaliGemma's projector, one linear layer: a row for each patch (arXiv 2407.07726)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from transformers import SiglipImageProcessorPil

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ..common.config_checks import check_common
from ..common.images import square_image
from .base import Calls, Vision
from .siglip import siglip_states, square_patches


class PaliGemmaVision(Vision):
    """See the module; the `vision_tower` and `multi_modal_projector` of a PaliGemmaForConditionalGeneration."""

    num_embeds: int

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the language model's hidden states."""
        super().__init__(checkpoint, "text_config")
        config: Any = checkpoint.config
        vision, name = config.vision_config, checkpoint.architecture
        if vision.model_type != "siglip_vision_model":
            raise UnsupportedModelError(
                f"{name} with the vision tower {vision.model_type!r} is not supported, only with 'siglip_vision_model'"
            )
        check_common(vision, name)
        if config.projection_dim != width:
            raise UnsupportedModelError(
                f"{name}: projection_dim={config.projection_dim!r:.40} differs from the language model's hidden_size={width}"
            )
        self.side = (vision.image_size, vision.image_size)
        self.num_embeds, self.width = square_patches(vision, name) ** 2, width

    def compose(self, calls: Calls, pixels: ir.Value) -> ir.Value:
        """The tower's states, then the projection."""
        model, vision = self.model.model, self.config.vision_config
        hidden = siglip_states(calls, model.vision_tower, "model.vision_tower.", pixels, "batch")
        shape = ("batch", self.num_embeds, vision.hidden_size)
        projector, path = model.multi_modal_projector, "model.multi_modal_projector."
        return calls(projector, path, {"hidden": (hidden, shape)})

    def settings(self) -> dict[str, Any]:
        """SigLIP's processor."""
        return square_image(self.checkpoint.image_settings, self.side, "siglip", SiglipImageProcessorPil)

    def tensors(self, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model's own forward takes of pictures, of everything that its processor made."""
        return {"pixel_values": made["pixel_values"]}

    def output(self, model: Any) -> nn.Module:
        """The projector."""
        return model.model.multi_modal_projector
