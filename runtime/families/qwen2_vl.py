"""Qwen2-VL: a vision tower that sees a whole picture at once; a time step of a video counts as one position."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bundle.manifest import ImageInfo, VideoInfo
from ..images.grid import Grid, units
from ..images.processors.patches import settings_of
from ..images.sampling.qwen2_vl import SampledVideo, sample_video
from ..images.video import Video
from .base import View
from .qwen_vl import QwenVL, paced_view


class Qwen2VL(QwenVL):
    """Source of the layout: transformers `Qwen2VLProcessor` and `Qwen2VLModel.get_rope_index`."""

    name = "qwen2-vl"

    def tower_inputs(
        self, pixels: np.ndarray, down: int, across: int, settings: ImageInfo
    ) -> dict[str, np.ndarray]:
        """See `QwenVL`."""
        return units(pixels, down, across, settings_of(settings)[0])

    def sample_video(self, video: Video, info: VideoInfo, grid: Grid) -> SampledVideo:
        """See `QwenVL`."""
        return sample_video(video, info, grid)

    def video_view(self, seen: SampledVideo, down: int, across: int, info: VideoInfo, read: Any) -> View:
        """See `QwenVL`."""
        return paced_view(seen, down, across, info, read)
