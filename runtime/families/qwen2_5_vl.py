"""Qwen2.5-VL: pictures of any size and videos, anywhere in a prompt or a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from ..bundle.manifest import ImageInfo, VideoInfo
from ..common.errors import ImageError
from ..images.load import load_image
from ..images.processors.patches import fitted, resized, settings_of
from ..images.video import Clip, Video, open_video, sampled
from ..images.windows import Grid, patchified, windows
from .base import Prepared, Prompt, Source, View, image_list, views_of
from .chat import Media, Medium, lay_out
from .fixed import incomplete
from .mrope import Span, positions
from .parts import gather_media

F = TypeVar("F")


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

        return View("image", down * across, read, (1, down, across, 1.0), picture=loaded)

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<|image_pad|>` themselves, else the pictures come first."""
        tokenizer, settings = bundle.tokenizer, bundle.manifest.image
        mark = tokenizer.token(bundle.manifest.text.image_token_id)
        if settings is None or mark is None:
            raise incomplete(self.name, "image", "text.image_token_id")
        video = None if settings.video is None else tokenizer.token(settings.video.token_id)
        media, prompt = gather_media(image_list(image), prompt)
        layout = lay_out(bundle, prompt, views_of(self, bundle, media), written(mark, video))
        if not layout.views:
            return Prepared(layout.ids)
        spans = [
            Span(start, *view.layout) for (start,), view in zip(layout.starts, layout.views, strict=True)
        ]
        return Prepared(layout.ids, layout.views, layout.slots, positions(len(layout.ids), spans))


@dataclass(frozen=True)
class Seen:
    """What is seen of a video: which frames of `clip` at `rate` a second, `group` of them in a row, each of `least` to `most`
    pixels."""

    clip: Clip
    chosen: list[int]
    group: int
    rate: float
    least: int
    most: int

    @classmethod
    def of(cls, video: Video, info: VideoInfo, grid: Grid) -> Seen:
        """Frames at the model's rate, in groups, all of one size; the more there are, the smaller. As
        `Qwen2VLVideoProcessor` with `cap_pixels_per_frame`, which is how the model's authors read videos.

        Raises ImageError for a video without a rate.
        """
        group, clip = grid.temporal_patch_size, open_video(video)
        if clip.fps is None:
            raise ImageError(f"{clip.name}: nobody knows its rate; give Video(frames, fps=...) (--video-fps)")
        wanted = video.sample_fps or info.fps
        chosen = sampled(clip.count, clip.fps, wanted, info.min_frames, info.max_frames, group)
        share = info.max_rows * grid.unit_pixels * group // len(chosen)
        most = max(min(info.max_pixels, share), int(info.min_pixels * 1.05))
        return cls(clip, chosen, group, len(chosen) / clip.count * clip.fps, info.min_pixels, most)

    def read(self) -> list[Image.Image]:
        """The frames."""
        return self.clip.read(self.chosen)

    def filled(self, frames: list[F]) -> list[F]:
        """The frames, the last one again until the last group is whole."""
        return frames + frames[-1:] * (-len(frames) % self.group)


def video_view(video: Video, settings: ImageInfo) -> View:
    """A video: see `Seen`; a row for every unit of the patches of each group of frames."""
    if settings.video is None:
        raise ImageError("this bundle reads pictures only: build it again to give videos")
    grid = settings_of(settings)[0]
    seen = Seen.of(video, settings.video, grid)
    first = seen.clip.read(seen.chosen[:1])[0]
    size = fitted(first.height, first.width, grid.unit_size, seen.least, seen.most)
    down, across = (side // grid.unit_size for side in size)
    steps = -(-len(seen.chosen) // seen.group)

    def read() -> tuple[dict[str, np.ndarray], ...]:
        frames = seen.filled([resized(frame, size, settings) for frame in seen.read()])
        groups = (np.concatenate(frames[at : at + seen.group]) for at in range(0, len(frames), seen.group))
        return tuple(windows(patchified(each, grid), down, across, grid) for each in groups)

    layout = (steps, down, across, settings.video.tokens_per_second * (seen.group / seen.rate))
    return View("video", steps * down * across, read, layout, frames=steps)


def written(image: str, video: str | None) -> Media:
    """What stands beside text in a prompt of this family, by the tokens that mark it."""
    kinds = {"image": (image, "pictures"), "video": (video, "videos")}
    return {
        kind: Medium(mark, f"<|vision_start|>{mark}<|vision_end|>", name)
        for kind, (mark, name) in kinds.items()
        if mark is not None
    }
