"""The vision tower of Qwen2-VL (Wang et al., arXiv 2409.12191, section 2.1): attention over the whole picture; four patches
become one embedding."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from transformers.models.qwen2_vl import modeling_qwen2_vl

from ....runtime.images.grid import units
from .base import Calls
from .packed import PATH, Given, PackedVision
from .patch_settings import sampled_video


def _merged(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor]:
    return (module.mlp(module.ln_q(hidden).reshape(-1, module.hidden_size)),)


class Qwen2Vision(PackedVision):
    """See the module; `model.visual` of a Qwen2VLForConditionalGeneration."""

    modeling: ClassVar[Any] = modeling_qwen2_vl
    angles: ClassVar[Any] = modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding
    out_field: ClassVar[str] = "hidden_size"

    @property
    def block_width(self) -> int:
        """See `PackedVision`."""
        return self.config.vision_config.embed_dim

    def tower_inputs(self, pixels: np.ndarray, down: int, across: int) -> dict[str, np.ndarray]:
        """See `PackedVision`."""
        return units(pixels, down, across, self.grid)

    def merged(self, calls: Calls, hidden: ir.Value, blocks: list[ir.Value], given: Given) -> ir.Value:
        """See `PackedVision`."""
        return calls(self.tower.merger, f"{PATH}merger.", {"hidden": (hidden, self.block_shape)}, _merged)

    def settings(self) -> dict[str, Any]:
        """Qwen2-VL's processor; a time step of a video is one position."""
        described, checkpoint = super().settings(), self.checkpoint
        token = checkpoint.config.video_token_id
        video = sampled_video(checkpoint.video_settings, described, token, None, checkpoint.max_pixels)
        return {**described, "video": video}
