"""BLIP-2's eyes: a ViT, the Q-Former and the projection, whatever language model follows (Li et al., arXiv 2301.12597)."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ..common.config_checks import check_common
from ..common.images import square_image
from .base import Calls, Vision, pair


class _Queries(nn.Module):
    """The learned queries and the norm before the Q-Former's first layer, under their names in the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.query_tokens = model.query_tokens
        self.qformer = nn.Module()
        self.qformer.layernorm = model.qformer.layernorm


def _queries(module: Any, image: torch.Tensor) -> tuple[torch.Tensor]:
    queries = module.query_tokens.expand(image.shape[0], -1, -1)
    return (module.qformer.layernorm(queries),)


class BlipVision(Vision):
    """See the module."""

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the language model's hidden states."""
        super().__init__(checkpoint, "text_config")
        config: Any = checkpoint.config
        for part in (config, config.vision_config, config.qformer_config):
            check_common(part, checkpoint.architecture)
        if config.qformer_config.use_qformer_text_input:
            raise UnsupportedModelError(
                f"{checkpoint.architecture}: use_qformer_text_input=true is not supported"
            )
        self.side = pair(config.vision_config.image_size)
        self.num_embeds, self.width = config.num_query_tokens, width

    def compose(self, calls: Calls, pixels: ir.Value) -> ir.Value:
        """Patches, layers, norm, queries, Q-Former, projection."""
        model, config = self.model, self.config
        height, width = self.side
        path = "vision_model.embeddings."
        hidden = calls(
            model.vision_model.embeddings, path, {"pixel_values": (pixels, ("batch", 3, height, width))}
        )
        patch = pair(config.vision_config.patch_size)
        count = (height // patch[0]) * (width // patch[1]) + 1
        image_shape = ("batch", count, config.vision_config.hidden_size)
        for i, layer in enumerate(model.vision_model.encoder.layers):
            hidden = calls(layer, f"vision_model.encoder.layers.{i}.", {"hidden": (hidden, image_shape)})
        norm = model.vision_model.post_layernorm
        image = calls(norm, "vision_model.post_layernorm.", {"hidden": (hidden, image_shape)})
        hidden = calls(_Queries(model), "", {"image": (image, image_shape)}, _queries)
        query_count = config.num_query_tokens
        query_shape = ("batch", query_count, config.qformer_config.hidden_size)

        def crossing(module: Any, hidden: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor]:
            return (module(hidden, None, image, query_length=query_count),)

        def plain(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
            return (module(hidden, None, None, query_length=query_count),)

        for i, layer in enumerate(model.qformer.encoder.layer):
            given = {"hidden": (hidden, query_shape)}
            if layer.has_cross_attention:
                given["image"] = (image, image_shape)
            function = crossing if layer.has_cross_attention else plain
            hidden = calls(layer, f"qformer.encoder.layer.{i}.", given, function)
        return calls(model.language_projection, "language_projection.", {"hidden": (hidden, query_shape)})

    def settings(self) -> dict[str, Any]:
        """BLIP's processor."""
        return square_image(self.checkpoint.image_settings, self.side, "blip", BlipImageProcessorPil)

    def output(self, model: Any) -> nn.Module:
        """The projection into the language model."""
        return model.language_projection
