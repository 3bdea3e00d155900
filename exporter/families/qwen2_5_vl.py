"""Qwen2.5-VL: pictures of any size in the prompt of a Qwen2 with M-RoPE (Bai et al., arXiv 2502.13923)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...runtime.bundle.manifest import VideoInfo
from ...runtime.families.base import image_list
from ...runtime.families.qwen2_5_vl import Seen, written
from ...runtime.images.video import Video
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.parts import Parts, ReferencePrompt
from .common.prompt_text import marked_text, tokenized
from .languages import language_for
from .vision.qwen2_5 import Qwen2_5Vision


class Qwen2_5_VLFamily(Family):
    """Exports Qwen2_5_VLForConditionalGeneration."""

    name: ClassVar[str] = "qwen2.5-vl"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen2_5_VLForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.language = language_for(checkpoint, self.config.text_config, "")
        self.vision: Qwen2_5Vision = Qwen2_5Vision(checkpoint, self.language.decoder.hidden_size)

    @property
    def image_token_id(self) -> int:
        """`<|image_pad|>`."""
        return self.config.image_token_id

    @property
    def video_token_id(self) -> int:
        """`<|video_pad|>`."""
        return self.config.video_token_id

    def parts(self, model: Any) -> Parts:
        """See `Family`."""
        return replace(super().parts(model), rotary=model.model.language_model.rotary_emb)

    def forward_arguments(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What stands for a picture (1) or a video (2)."""
        return {
            "mm_token_type_ids": (input_ids == self.image_token_id).long()
            + 2 * (input_ids == self.video_token_id).long()
        }

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """As `Qwen2_5_VLProcessor`, which needs torchvision for the videos that it reads too: the image processor, the
        chat template, `<|image_pad|>` repeated for every embedding of a picture, `<|video_pad|>` for every embedding of a video."""
        given = image_list(image)
        videos = [each for each in given if isinstance(each, Video)]
        images = [each for each in given if not isinstance(each, Video)]
        marks = self.checkpoint.tokenizer.convert_ids_to_tokens([self.image_token_id, self.video_token_id])
        kinds = ["video" if isinstance(each, Video) else "image" for each in given]
        text, surrounded = marked_text(self, prompt, kinds, written(*marks))
        ids = tokenized(self, text, surrounded)
        if not given:
            return ReferencePrompt(tuple(ids))
        vision = self._seen(images) | self._watched(videos)
        grids = {name: vision[name] for name in ("image_grid_thw", "video_grid_thw") if name in vision}
        counts = {
            mark: iter((grids[name].prod(-1) // self.vision.grid.patches).tolist())
            for mark, name in (
                (self.image_token_id, "image_grid_thw"),
                (self.video_token_id, "video_grid_thw"),
            )
            if name in grids
        }
        whole = [i for token in ids for i in [token] * (next(counts[token]) if token in counts else 1)]
        input_ids = torch.tensor([whole])
        positions, _ = self.vision.model.model.get_rope_index(
            input_ids,
            **self.forward_arguments(input_ids),
            **grids,
            second_per_grid_ts=vision.get("second_per_grid_ts"),
        )
        steps = vision["video_grid_thw"][:, 0].tolist() if videos else ()
        return ReferencePrompt(tuple(whole), vision, positions=positions[:, 0], video_steps=tuple(steps))

    def _seen(self, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """What the tower takes of pictures."""
        if not images:
            return {}
        described = self.vision.settings()
        return self._patches(images, described["min_pixels"], described["max_pixels"])

    def _watched(self, videos: Sequence[Video]) -> dict[str, torch.Tensor]:
        """What the tower takes of videos: a patch holds the pixels of a group of frames, each of which the processor of
        pictures reads as if it stood still."""
        if not videos:
            return {}
        info, grid = VideoInfo(**self.vision.settings()["video"]), self.vision.grid
        group = grid.temporal_patch_size
        pixels, grids, seconds = [], [], []
        for video in videos:
            seen = Seen.of(video, info, grid)
            made = self._patches(seen.filled(seen.read()), seen.least, seen.most)
            _, down, across = made["image_grid_thw"][0].tolist()
            still = made["pixel_values"].reshape(-1, group, down * across, 3, group, grid.patch_size**2)
            moving = torch.stack([still[:, frame, :, :, frame] for frame in range(group)], 3)
            pixels.append(moving.reshape(-1, grid.patch_values))
            grids.append([len(still), down, across])
            seconds.append(group / seen.rate)
        return {
            "pixel_values_videos": torch.cat(pixels),
            "video_grid_thw": torch.tensor(grids),
            "second_per_grid_ts": torch.tensor(seconds),
        }

    def _patches(self, pictures: Sequence[Any], least: int, most: int) -> dict[str, torch.Tensor]:
        """`pixel_values` and `image_grid_thw` of pictures that keep between so many pixels."""
        size = {"shortest_edge": least, "longest_edge": most}
        return dict(self.checkpoint.image_processor(images=list(pictures), size=size, return_tensors="pt"))
