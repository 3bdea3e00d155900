"""Frames spread evenly over the whole video, of a size that bounds the pixels of all together, each group of them with its
time in the text (Qwen3-VL, arXiv 2511.21631).

Reference: transformers' `Qwen3VLVideoProcessor`, and `Qwen3VLProcessor` for the times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...bundle.manifest import VideoInfo
from ...common.errors import ImageError
from ..grid import Grid
from ..processors.patches import check_ratio
from ..video import Video, open_with_rate
from .qwen2_vl import SampledVideo


@dataclass(frozen=True)
class TimedVideo(SampledVideo):
    """See `SampledVideo`; `least` and `most` are the pixels of all frames together. `fps` is the rate of the clip."""

    fps: float

    @property
    def timestamps(self) -> list[float]:
        """Seconds of each time step: the middle of its first and its last frame."""
        times = [index / self.fps for index in self.filled(self.chosen)]
        return [(times[at] + times[at + self.group - 1]) / 2 for at in range(0, len(times), self.group)]

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """See `SampledVideo`."""
        return fitted_volume(len(self.chosen), height, width, self.grid, self.least, self.most)


def sample_video(video: Video, info: VideoInfo, grid: Grid) -> TimedVideo:
    """What is seen of a video. Raises `ImageError` for one without a rate, and for one of fewer frames than a time step has."""
    clip, fps = open_with_rate(video)
    count = int(clip.count / fps * (video.sample_fps or info.fps))
    count = min(max(count, info.min_frames), info.max_frames, clip.count)
    if count < grid.temporal_patch_size:
        raise ImageError(
            f"{clip.name}: a video of {clip.count} frame, of which this model reads {grid.temporal_patch_size} at a time; "
            "give it as a picture"
        )
    chosen = np.linspace(0, clip.count - 1, count).round().astype(int).tolist()
    most = info.max_pixels
    if info.max_frame_rows is not None:
        frame = min(info.max_frame_rows * grid.unit_pixels, info.max_pixels // count)
        most = max(frame, int(info.min_pixels * 1.05)) * count
    return TimedVideo(clip, chosen, grid, count / clip.count * fps, info.min_pixels, most, fps=fps)


def fitted_volume(frames: int, height: int, width: int, grid: Grid, least: int, most: int) -> tuple[int, int]:
    """(height, width) in whole units of `frames` frames whose pixels together are in least..most, the ratio nearly kept;
    `smart_resize` of transformers' `Qwen3VLVideoProcessor`. Raises `ImageError` for frames slimmer than 1 : 200."""
    unit, group = grid.unit_size, grid.temporal_patch_size
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    check_ratio(height, width)
    down, across = round(height / unit) * unit, round(width / unit) * unit
    volume = round(frames / group) * group * down * across
    if volume > most:
        shrink = math.sqrt(frames * height * width / most)
        down = max(unit, math.floor(height / shrink / unit) * unit)
        across = max(unit, math.floor(width / shrink / unit) * unit)
    elif volume < least:
        grow = math.sqrt(least / (frames * height * width))
        down, across = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return down, across
