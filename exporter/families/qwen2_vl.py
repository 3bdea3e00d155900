"""Qwen2-VL: pictures of any size in the prompt of a Qwen2 with M-RoPE (Wang et al., arXiv 2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ...runtime.bundle.manifest import VideoInfo
from ...runtime.images.sampling.qwen2_vl import sample_video
from ...runtime.images.video import Video
from .qwen_vl import QwenVLFamily, Tensors
from .vision.qwen2 import Qwen2Vision


class Qwen2VLFamily(QwenVLFamily):
    """Exports Qwen2VLForConditionalGeneration."""

    name: ClassVar[str] = "qwen2-vl"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen2VLForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_vl",)
    tower: ClassVar[Any] = Qwen2Vision

    def watched(self, videos: Sequence[Video]) -> tuple[Tensors, list[str]]:
        """See `QwenVLFamily`; frames between bounds of their pixels, each read as if it stood still."""
        info, grid = VideoInfo(**self.vision.settings()["video"]), self.vision.grid
        mark = self.checkpoint.tokenizer.convert_ids_to_tokens(self.video_token_id)
        pixels, grids, texts, seconds = [], [], [], []
        for video in videos:
            seen = sample_video(video, info, grid)
            size = {"shortest_edge": seen.least, "longest_edge": seen.most}
            made = self.patches(seen.filled(seen.read()), size=size)
            _, down, across = made["image_grid_thw"][0].tolist()
            pixels.append(self.moving(made["pixel_values"], down * across))
            grids.append([seen.steps, down, across])
            texts.append(mark * (seen.steps * down * across // grid.patches))
            seconds.append(grid.temporal_patch_size / seen.rate)
        return {
            "pixel_values_videos": torch.cat(pixels),
            "video_grid_thw": torch.tensor(grids),
            **self.pace(torch.tensor(seconds)),
        }, texts

    def pace(self, seconds: torch.Tensor) -> Tensors:
        """What the model is told of the seconds that a time step of each video takes."""
        return {}
