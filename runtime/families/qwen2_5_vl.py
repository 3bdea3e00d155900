"""Qwen2.5-VL: a vision tower with windows; positions say the pace of a video."""

from __future__ import annotations

import numpy as np

from ..bundle.manifest import ImageInfo
from ..images.processors.patches import positive, settings_of
from ..images.windows import windows
from .qwen2_vl import Qwen2VL


class Qwen25VL(Qwen2VL):
    """Source of the layout: transformers `Qwen2_5_VLProcessor` and `Qwen2_5_VLModel.get_rope_index`."""

    name = "qwen2.5-vl"

    def tower_inputs(
        self, pixels: np.ndarray, down: int, across: int, settings: ImageInfo
    ) -> dict[str, np.ndarray]:
        """See `QwenVL`."""
        grid = settings_of(settings)[0]
        return windows(pixels, down, across, grid, positive(settings, "window_size"))
