"""Qwen3-VL: a vision tower whose table of positions is resampled to a picture; the time of each step of a video is written
into the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..bundle.manifest import ImageInfo, VideoInfo
from ..images.grid import Grid, units
from ..images.position_table import table_entries
from ..images.processors.patches import positive, settings_of
from ..images.sampling.qwen3_vl import TimedVideo, sample_video
from ..images.video import Video
from .base import View
from .qwen_vl import QwenVL


class Qwen3VL(QwenVL):
    """Source of the layout: transformers `Qwen3VLProcessor` and `Qwen3VLModel.get_rope_index`."""

    name = "qwen3-vl"

    def tower_inputs(
        self, pixels: np.ndarray, down: int, across: int, settings: ImageInfo
    ) -> dict[str, np.ndarray]:
        """See `QwenVL`."""
        grid, side = settings_of(settings)[0], positive(settings, "table_side")
        return tower_inputs(pixels, down, across, grid, side)

    def sample_video(self, video: Video, info: VideoInfo, grid: Grid) -> TimedVideo:
        """See `QwenVL`."""
        return sample_video(video, info, grid)

    def video_view(self, seen: Any, down: int, across: int, info: VideoInfo, read: Any) -> View:
        """See `QwenVL`; each time step is a picture behind its time."""
        count = seen.steps * down * across
        text = timed(seen.timestamps, down * across)
        return View("video", count, read, (1, down, across, 1.0), frames=seen.steps, written=text)


def tower_inputs(pixels: np.ndarray, down: int, across: int, grid: Grid, side: int) -> dict[str, np.ndarray]:
    """Inputs of the `vision` graph for `down` × `across` units, of a tower whose table has `side` × `side` entries: see
    `units` and `table_entries`."""
    inputs, merge = units(pixels, down, across, grid), grid.merge_size
    return inputs | table_entries(inputs["patch_positions"], down * merge, across * merge, side)


def timed(timestamps: Sequence[float], count: int) -> tuple[str | int, ...]:
    """What a video becomes in a prompt: before the `count` embeddings of every time step its seconds."""
    pieces: list[str | int] = []
    end = ""
    for seconds in timestamps:
        pieces += [f"{end}<{seconds:.1f} seconds><|vision_start|>", count]
        end = "<|vision_end|>"
    return (*pieces, end)
