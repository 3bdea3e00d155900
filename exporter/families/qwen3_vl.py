"""Qwen3-VL: pictures of any size and videos with times in the prompt of a Qwen3 with interleaved M-RoPE and DeepStack (arXiv
2511.21631)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from ...runtime.bundle.manifest import VideoInfo
from ...runtime.images.sampling.qwen3_vl import sample_video
from ...runtime.images.video import Video
from .common.parts import Parts
from .qwen_vl import QwenVLFamily, Tensors
from .vision.qwen3 import Qwen3Vision


class Qwen3VLFamily(QwenVLFamily):
    """Exports Qwen3VLForConditionalGeneration."""

    name: ClassVar[str] = "qwen3-vl"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen3VLForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl",)
    tower: ClassVar[Any] = Qwen3Vision

    def parts(self, model: Any) -> Parts:
        """See `Family`."""
        return replace(super().parts(model), put_deepstack=self._with_deepstack)

    def _with_deepstack(self, output: Any, image_embeds: torch.Tensor) -> Any:
        size = self.language.decoder.hidden_size
        parts = image_embeds.reshape(-1, image_embeds.shape[-1]).split(size, -1)
        output.deepstack_features = [part.to(output.pooler_output.dtype) for part in parts[1:]]
        return output

    def watched(self, videos: Sequence[Video]) -> tuple[Tensors, list[str]]:
        """See `QwenVLFamily`; frames of one size, each read as if it stood still, and behind the seconds of each time step its
        embeddings."""
        info, grid = VideoInfo(**self.vision.settings()["video"]), self.vision.grid
        mark = self.checkpoint.tokenizer.convert_ids_to_tokens(self.video_token_id)
        pixels, grids, texts = [], [], []
        for video in videos:
            seen = sample_video(video, info, grid)
            frames = seen.filled(seen.read())
            height, width = seen.fitted(frames[0].height, frames[0].width)
            frames = [each.resize((width, height), Image.Resampling.BICUBIC) for each in frames]
            made = self.patches(frames, do_resize=False)
            _, down, across = made["image_grid_thw"][0].tolist()
            pixels.append(self.moving(made["pixel_values"], down * across))
            grids.append([seen.steps, down, across])
            processor: Any = None  # the method reads nothing of it
            times = Qwen3VLProcessor._calculate_timestamps(
                processor, list(seen.chosen), seen.fps, grid.temporal_patch_size
            )
            step = f"<|vision_start|>{mark * (down * across // grid.patches)}<|vision_end|>"
            texts.append("".join(f"<{seconds:.1f} seconds>{step}" for seconds in times))
        return {"pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(grids)}, texts

    def video_steps(self, vision: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        """See `QwenVLFamily`; each run is one time step."""
        return ()
