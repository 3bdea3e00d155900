"""Frames at the model's rate, in groups, all of one size; the more there are, the smaller (Qwen2-VL, Qwen2.5-VL).

Reference: transformers' `Qwen2VLVideoProcessor` with `cap_pixels_per_frame`, which is how the models' authors read videos.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from PIL import Image

from ...bundle.manifest import VideoInfo
from ...common.errors import BundleError
from ..grid import Grid
from ..processors.patches import fitted
from ..video import Clip, Video, open_with_rate, sampled

F = TypeVar("F")


@dataclass(frozen=True)
class SampledVideo:
    """Frames `chosen` of `clip`, `rate` a second, of which each group of `grid.temporal_patch_size` is a time step; a frame
    keeps between `least` and `most` pixels."""

    clip: Clip
    chosen: list[int]
    grid: Grid
    rate: float
    least: int
    most: int

    @property
    def group(self) -> int:
        """Frames of a time step."""
        return self.grid.temporal_patch_size

    @property
    def steps(self) -> int:
        """Time steps."""
        return -(-len(self.chosen) // self.group)

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in whole units of frames that are `height` × `width`. Raises `ImageError` for slim ones."""
        return fitted(height, width, self.grid.unit_size, self.least, self.most)

    def read(self) -> list[Image.Image]:
        """The frames."""
        return self.clip.read(self.chosen)

    def filled(self, frames: list[F]) -> list[F]:
        """The frames, the last one again until the last group is whole."""
        return frames + frames[-1:] * (-len(frames) % self.group)


def sample_video(video: Video, info: VideoInfo, grid: Grid) -> SampledVideo:
    """What is seen of a video. Raises `ImageError` for one without a rate."""
    clip, fps = open_with_rate(video)
    wanted, group = video.sample_fps or info.fps, grid.temporal_patch_size
    if info.max_rows is None:
        raise BundleError("manifest field 'image.video.max_rows' must be set; build the bundle again")
    chosen = sampled(clip.count, fps, wanted, info.min_frames, info.max_frames, group)
    share = info.max_rows * grid.unit_pixels * group // len(chosen)
    most = max(min(info.max_pixels, share), int(info.min_pixels * 1.05))
    return SampledVideo(clip, chosen, grid, len(chosen) / clip.count * fps, info.min_pixels, most)
