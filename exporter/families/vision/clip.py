"""CLIP's tower with LLaVA's projector (Liu et al., arXiv 2310.03744): hidden states of a layer before the last, not normed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import onnx_ir as ir
import torch
from torch import nn
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ..common.config_checks import check_common
from ..common.images import cropped_image
from .base import Calls, Vision, pair


def _embedded(module: Any, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
    # As the module's forward, whose buffer of positions 0, 1, 2, … is empty in a hollow model.
    patches = module.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
    first = module.class_embedding.expand(pixel_values.shape[0], 1, -1)
    return (torch.cat([first, patches], dim=1) + module.position_embedding.weight,)


def _patches(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
    return (module(hidden[:, 1:]),)


def _layer(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
    return (module(hidden, None),)


class ClipVision(Vision):
    """See the module; the `vision_tower` and `multi_modal_projector` of a LlavaForConditionalGeneration."""

    pictures: ClassVar[str] = "batch"
    """The dimension of pictures in `pixel_values`."""

    def __init__(self, checkpoint: Checkpoint, width: int) -> None:
        """`width` is that of the language model's hidden states."""
        super().__init__(checkpoint, "text_config")
        config: Any = checkpoint.config
        vision, name = config.vision_config, checkpoint.architecture
        if vision.model_type != "clip_vision_model":
            raise UnsupportedModelError(
                f"{name} with the vision tower {vision.model_type!r} is not supported, only with 'clip_vision_model'"
            )
        check_common(vision, name)
        layer = config.vision_feature_layer
        layers = vision.num_hidden_layers
        if type(layer) is not int or not -layers - 1 <= layer <= layers:
            raise UnsupportedModelError(
                f"{name}: vision_feature_layer={layer!r:.80} is not one of the {layers + 1} states of the tower"
            )
        self.used = layer if layer >= 0 else layers + 1 + layer
        """Layers of the tower that the embeddings pass."""
        self.side = pair(vision.image_size)
        patch = pair(vision.patch_size)
        self._states = (self.side[0] // patch[0]) * (self.side[1] // patch[1]) + 1
        self._whole = config.vision_feature_select_strategy == "full"
        self.num_embeds, self.width = self._states - (not self._whole), width

    def compose(self, calls: Calls, pixels: ir.Value) -> ir.Value:
        """Patches, norm, layers, then the projection, of all states or of those of patches."""
        tower, path = self.model.model.vision_tower, "model.vision_tower."
        shape = (self.pictures, self._states, self.config.vision_config.hidden_size)
        given = {"pixel_values": (pixels, (self.pictures, 3, *self.side))}
        hidden = calls(tower.embeddings, f"{path}embeddings.", given, _embedded)
        hidden = calls(tower.pre_layrnorm, f"{path}pre_layrnorm.", {"hidden": (hidden, shape)})
        for i, layer in enumerate(tower.encoder.layers[: self.used]):
            hidden = calls(layer, f"{path}encoder.layers.{i}.", {"hidden": (hidden, shape)}, _layer)
        projector, given = self.model.model.multi_modal_projector, {"hidden": (hidden, shape)}
        if self._whole:
            return calls(projector, "model.multi_modal_projector.", given)
        return calls(projector, "model.multi_modal_projector.", given, _patches)

    def settings(self) -> dict[str, Any]:
        """CLIP's processor."""
        return cropped_image(self.checkpoint.image_settings, self.side, "clip", CLIPImageProcessorPil)

    def tensors(self, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model's own forward takes of pictures, of everything that its processor made."""
        return {"pixel_values": made["pixel_values"]}

    def output(self, model: Any) -> nn.Module:
        """The projector."""
        return model.model.multi_modal_projector
