"""Qwen2.5-VL: pictures of any size and videos, anywhere in a prompt or a conversation."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bundle.manifest import ImageInfo
from ..errors import ImageError
from ..images.load import load_image
from ..images.processors.patches import fitted, resized, settings_of
from ..images.video import Video, open_video, sampled
from ..images.windows import patchified, windows
from .base import Prepared, Prompt, Source, View, views_of
from .chat import Media, Medium, laid_out
from .fixed import incomplete
from .mrope import Span, positions


class Qwen25VL:
    """Source of the layout: transformers `Qwen2_5_VLProcessor` and `Qwen2_5_VLModel.get_rope_index`."""

    name = "qwen2.5-vl"

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; a picture keeps its ratio, and becomes a row for every unit of its patches. A `Video` becomes as
        many for each two of the frames that are sampled."""
        settings = bundle.manifest.image
        if settings is None:
            raise incomplete(self.name, "image", "text.image_token_id")
        if isinstance(image, Video):
            return video_view(image, settings)
        loaded = load_image(image)
        grid, least, most = settings_of(settings)
        size = fitted(loaded.height, loaded.width, grid.unit_size, least, most)
        down, across = (side // grid.unit_size for side in size)

        def read() -> tuple[dict[str, np.ndarray], ...]:
            frames = np.repeat(resized(loaded, size, settings), grid.temporal_patch_size, 0)
            return (windows(patchified(frames, grid), down, across, grid),)

        return View("image", down * across, read, (1, down, across, 1.0))

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<|image_pad|>` themselves, else the pictures come first."""
        tokenizer, settings = bundle.tokenizer, bundle.manifest.image
        mark = tokenizer.token(bundle.manifest.text.image_token_id)
        if settings is None or mark is None:
            raise incomplete(self.name, "image", "text.image_token_id")
        video = None if settings.video is None else tokenizer.token(settings.video.token_id)
        found = laid_out(bundle, prompt, views_of(self, bundle, image), written(mark, video))
        if not found.views:
            return Prepared(found.ids)
        spans = [Span(start, *view.layout) for start, view in zip(found.starts, found.views, strict=True)]
        return Prepared(found.ids, found.views, found.slots, positions(len(found.ids), spans))


def video_view(video: Video, settings: ImageInfo) -> View:
    """A video: frames sampled at the model's rate, in pairs, all of one size; the more there are, the smaller. As
    `Qwen2VLVideoProcessor` with `cap_pixels_per_frame`, which is how the model's authors read videos."""
    info = settings.video
    if info is None:
        raise ImageError("this bundle reads pictures only: build it again to give videos")
    grid = settings_of(settings)[0]
    group = grid.temporal_patch_size
    clip = open_video(video)
    if clip.fps is None:
        raise ImageError(f"{clip.name}: nobody knows its rate; give Video(frames, fps=...) (--video-fps)")
    chosen = sampled(
        clip.count, clip.fps, video.sample_fps or info.fps, info.min_frames, info.max_frames, group
    )
    first = clip.read(chosen[:1])[0]
    share = info.max_rows * grid.unit_pixels * group // len(chosen)
    most = max(min(info.max_pixels, share), int(info.min_pixels * 1.05))
    size = fitted(first.height, first.width, grid.unit_size, info.min_pixels, most)
    down, across = (side // grid.unit_size for side in size)
    steps = -(-len(chosen) // group)

    def read() -> tuple[dict[str, np.ndarray], ...]:
        frames = [resized(frame, size, settings) for frame in clip.read(chosen)]
        frames += frames[-1:] * (steps * group - len(frames))
        pairs = (np.concatenate(frames[at : at + group]) for at in range(0, len(frames), group))
        return tuple(windows(patchified(pair, grid), down, across, grid) for pair in pairs)

    seen = len(chosen) / clip.count * clip.fps
    layout = (steps, down, across, info.tokens_per_second * (group / seen))
    return View("video", steps * down * across, read, layout, frames=steps)


def written(image: str, video: str | None) -> Media:
    """What stands beside text in a prompt of this family, by the tokens that mark it."""
    kinds = {"image": (image, "pictures"), "video": (video, "videos")}
    return {
        kind: Medium(mark, f"<|vision_start|>{mark}<|vision_end|>", name)
        for kind, (mark, name) in kinds.items()
        if mark is not None
    }
