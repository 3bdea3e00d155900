"""Qwen2.5-VL: pictures of any size in the prompt of a Qwen2 with M-RoPE (Bai et al., arXiv 2502.13923)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from .qwen2_vl import Qwen2VLFamily
from .qwen_vl import Tensors
from .vision.qwen2_5 import Qwen2_5Vision


class Qwen2_5_VLFamily(Qwen2VLFamily):
    """Exports Qwen2_5_VLForConditionalGeneration."""

    name: ClassVar[str] = "qwen2.5-vl"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen2_5_VLForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)
    tower: ClassVar[Any] = Qwen2_5Vision

    def pace(self, seconds: torch.Tensor) -> Tensors:
        """See `Qwen2VLFamily`."""
        return {"second_per_grid_ts": seconds}

    def positions(self, input_ids: torch.Tensor, vision: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `QwenVLFamily`."""
        grids = {name: vision[name] for name in ("image_grid_thw", "video_grid_thw") if name in vision}
        found, _ = self.vision.model.model.get_rope_index(
            input_ids,
            **self.forward_arguments(input_ids),
            **grids,
            second_per_grid_ts=vision.get("second_per_grid_ts"),
        )
        return found
