"""SigLIP's tower with Gemma 3's projector: squares of patches averaged, an RMS norm and one matrix (arXiv 2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ..common.config_checks import check_common
from ..common.images import square_image
from .base import Calls, Vision
from .siglip import siglip_states, square_patches


def _projected(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
    """Gemma3MultiModalProjector's forward; its average pooling is a product, for want of an operator."""
    across, inside = module.tokens_per_side, module.kernel_size
    squares = hidden.unflatten(1, (across, inside, across, inside)).transpose(2, 3)
    squares = squares.flatten(1, 2).flatten(2, 3)  # [pictures, rows, patches of a square, width]
    mean = torch.full((1, inside * inside), 1.0 / (inside * inside))
    rows = module.mm_soft_emb_norm((mean @ squares).squeeze(2))
    return (torch.matmul(rows, module.mm_input_projection_weight),)


class Gemma3Vision(Vision):
    """See the module; the `vision_tower` and `multi_modal_projector` of a Gemma3ForConditionalGeneration."""

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
        patches, count = square_patches(vision, name), config.mm_tokens_per_image
        across = int(count**0.5) if type(count) is int and count > 0 else 0
        if not across or across**2 != count or patches % across:
            raise UnsupportedModelError(
                f"{name}: mm_tokens_per_image={count!r:.40} is not a square whose side divides the {patches} patches of a side"
            )
        self.side = (vision.image_size, vision.image_size)
        self.num_embeds, self.width = count, width

    def compose(self, calls: Calls, pixels: ir.Value) -> ir.Value:
        """The tower's states, then the projection."""
        model, vision = self.model.model, self.config.vision_config
        hidden = siglip_states(calls, model.vision_tower, "model.vision_tower.", pixels, "batch")
        shape = ("batch", (vision.image_size // vision.patch_size) ** 2, vision.hidden_size)
        projector, path = model.multi_modal_projector, "model.multi_modal_projector."
        return calls(projector, path, {"hidden": (hidden, shape)}, _projected)

    def settings(self) -> dict[str, Any]:
        """Gemma 3's processor. Raises UnsupportedModelError where it cuts pictures (pan and scan)."""
        settings = self.checkpoint.image_settings
        if settings.get("do_pan_and_scan"):
            raise UnsupportedModelError("image processor: do_pan_and_scan=true is not supported")
        return square_image(settings, self.side, "gemma3", Gemma3ImageProcessorPil)

    def tensors(self, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model's own forward takes of pictures, of everything that its processor made."""
        return {"pixel_values": made["pixel_values"]}

    def output(self, model: Any) -> nn.Module:
        """The projector."""
        return model.model.multi_modal_projector
