"""What the Qwen-VL families share: pictures of any size and videos, anywhere in a prompt or a conversation, with positions of
three axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bundle.manifest import ImageInfo, VideoInfo
from ..common.errors import ImageError
from ..images.grid import Grid, patchified
from ..images.load import load_image
from ..images.processors.patches import fitted, resized, settings_of
from ..images.sampling.qwen2_vl import SampledVideo
from ..images.video import Video
from .base import Prepared, Prompt, Source, View, image_list, views_of
from .chat import Media, Medium, lay_out
from .fixed import incomplete
from .mrope import Span, positions
from .parts import gather_media


class QwenVL:
    """Source of the layout: transformers' `Qwen2VLProcessor`, `get_rope_index` of its models, and their successors'."""

    name: str

    # --- what a family says ---

    def tower_inputs(
        self, pixels: np.ndarray, down: int, across: int, settings: ImageInfo
    ) -> dict[str, np.ndarray]:
        """Inputs of the `vision` graph for one picture, or one time step of a video, of `down` × `across` units; `pixels` as
        of `patchified`."""
        raise NotImplementedError

    def sample_video(self, video: Video, info: VideoInfo, grid: Grid) -> SampledVideo:
        """What is seen of a video. Raises `ImageError`."""
        raise NotImplementedError

    def video_view(self, seen: SampledVideo, down: int, across: int, info: VideoInfo, read: Any) -> View:
        """The view of a video whose time steps are `down` × `across` units; `read` makes the tower's inputs."""
        raise NotImplementedError

    # --- what follows ---

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; a picture keeps its ratio, and becomes an embedding for every unit of its patches. A `Video` becomes
        as many for each time step."""
        settings = bundle.manifest.image
        if settings is None:
            raise incomplete(self.name, "image", "text.image_token_id")
        if isinstance(image, Video):
            return self._video(image, settings)
        loaded = load_image(image)
        grid, least, most = settings_of(settings)
        size = fitted(loaded.height, loaded.width, grid.unit_size, least, most)
        down, across = (side // grid.unit_size for side in size)

        def read() -> tuple[dict[str, np.ndarray], ...]:
            frames = np.repeat(resized(loaded, size, settings), grid.temporal_patch_size, 0)
            return (self.tower_inputs(patchified(frames, grid), down, across, settings),)

        return View("image", down * across, read, (1, down, across, 1.0), picture=loaded)

    def _video(self, video: Video, settings: ImageInfo) -> View:
        if settings.video is None:
            raise ImageError("this bundle reads pictures only: build it again to give videos")
        grid = settings_of(settings)[0]
        seen = self.sample_video(video, settings.video, grid)
        first = seen.clip.read(seen.chosen[:1])[0]
        size = seen.fitted(first.height, first.width)
        down, across = (side // grid.unit_size for side in size)

        def read() -> tuple[dict[str, np.ndarray], ...]:
            frames = seen.filled([resized(frame, size, settings) for frame in seen.read()])
            groups = (
                np.concatenate(frames[at : at + seen.group]) for at in range(0, len(frames), seen.group)
            )
            return tuple(self.tower_inputs(patchified(each, grid), down, across, settings) for each in groups)

        return self.video_view(seen, down, across, settings.video, read)

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
            Span(start, *view.layout)
            for starts, view in zip(layout.starts, layout.views, strict=True)
            for start in starts
        ]
        return Prepared(layout.ids, layout.views, layout.slots, positions(len(layout.ids), spans))


def paced_view(seen: SampledVideo, down: int, across: int, info: VideoInfo, read: Any) -> View:
    """A video in one run of embeddings, whose positions say its pace: `tokens_per_second`, or one for each time step."""
    interval = 1.0
    if info.tokens_per_second is not None:
        interval = info.tokens_per_second * (seen.group / seen.rate)
    layout = (seen.steps, down, across, interval)
    return View("video", seen.steps * down * across, read, layout, frames=seen.steps)


def written(image: str, video: str | None) -> Media:
    """What stands beside text in a prompt of these families, by the tokens that mark it."""
    kinds = {"image": (image, "pictures"), "video": (video, "videos")}
    return {
        kind: Medium(mark, f"<|vision_start|>{mark}<|vision_end|>", name)
        for kind, (mark, name) in kinds.items()
        if mark is not None
    }
