"""What transformers' Qwen2.5-VL takes of pictures and videos. Its processor of videos needs torchvision: patches of a
pair of frames are made by its own processor of pictures, a frame each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from transformers import AutoConfig, Qwen2VLImageProcessorPil
from vlmexport.runtime.bundle.manifest import VideoInfo


def model_inputs(
    checkpoint: Path, info: VideoInfo | None, ids: Sequence[int], videos: Sequence[tuple[Sequence[Image], float]],
    images: Sequence[Image],
) -> dict[str, Any]:  # fmt: skip
    """Arguments of the model's `generate`; a video is the frames that were sampled of it, and their rate a second."""
    given = torch.tensor([list(ids)])
    config = AutoConfig.from_pretrained(checkpoint)
    kinds = (given == config.image_token_id).long() + 2 * (given == config.video_token_id).long()
    found: dict[str, Any] = {
        "input_ids": given,
        "attention_mask": torch.ones_like(given),
        "mm_token_type_ids": kinds,
    }
    if images:
        own = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
        found |= dict(own(images=list(images), return_tensors="pt"))
    if not videos:
        return found
    assert info is not None
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": info.min_pixels, "longest_edge": info.max_pixels}
    )
    grid, patches = [], []
    for frames, _ in videos:
        frames = [*frames, frames[-1]] if len(frames) % 2 else list(frames)
        each = [processor(images=frame, return_tensors="pt") for frame in frames]
        _, down, across = each[0]["image_grid_thw"][0].tolist()
        grid.append([len(frames) // 2, down, across])
        for even, odd in zip(each[::2], each[1::2], strict=True):
            pair = even["pixel_values"].reshape(-1, 3, 2, 14 * 14).clone()
            pair[:, :, 1] = odd["pixel_values"].reshape(-1, 3, 2, 14 * 14)[:, :, 1]
            patches.append(pair.reshape(len(pair), -1))
    found["pixel_values_videos"] = torch.cat(patches)
    found["video_grid_thw"] = torch.tensor(grid)
    found["second_per_grid_ts"] = [2 / rate for _, rate in videos]
    return found
