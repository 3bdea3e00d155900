"""Qwen2.5-VL: pictures of any size in the prompt of a Qwen2 with M-RoPE (Bai et al., arXiv 2502.13923)."""

from __future__ import annotations

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
