"""ViT as the encoder of a captioner (Dosovitskiy et al., arXiv 2010.11929): every hidden state of its last layer, the class
token's included, after the final norm; a projection follows where the decoder is of another width."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from torch import nn
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from ...checkpoint.checkpoint import Checkpoint
from ..common.config_checks import check_common
from ..common.images import square_image
from .base import Calls, Vision, pair


class ViTVision(Vision):
    """See the module; the `encoder` of a VisionEncoderDecoderModel."""

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the decoder's hidden states."""
        super().__init__(checkpoint, "decoder")
        config: Any = checkpoint.config.encoder
        check_common(config, checkpoint.architecture)
        self.side = pair(config.image_size)
        patch = pair(config.patch_size)
        num_embeds = (self.side[0] // patch[0]) * (self.side[1] // patch[1]) + 1
        self.num_embeds, self._shape = num_embeds, ("batch", num_embeds, config.hidden_size)
        self.width = width

    def compose(self, calls: Calls, pixels: ir.Value) -> ir.Value:
        """Patches, layers, norm, and the projection where there is one."""
        encoder = self.model.encoder
        hidden = calls(
            encoder.embeddings, "encoder.embeddings.", {"pixel_values": (pixels, ("batch", 3, *self.side))}
        )
        for i, layer in enumerate(encoder.layers):
            hidden = calls(layer, f"encoder.layers.{i}.", {"hidden": (hidden, self._shape)})
        hidden = calls(encoder.layernorm, "encoder.layernorm.", {"hidden": (hidden, self._shape)})
        if hasattr(self.model, "enc_to_dec_proj"):
            hidden = calls(self.model.enc_to_dec_proj, "enc_to_dec_proj.", {"hidden": (hidden, self._shape)})
        return hidden

    def settings(self) -> dict[str, Any]:
        """ViT's processor."""
        return square_image(self.checkpoint.image_settings, self.side, "vit", ViTImageProcessorPil)

    def output(self, model: Any) -> nn.Module:
        """The projection into the decoder, or the tower's last norm."""
        return getattr(model, "enc_to_dec_proj", None) or model.encoder.layernorm
