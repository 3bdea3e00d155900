"""SmolVLM and Idefics 3: pictures in tiles and videos frame by frame, each tile and frame behind its name in the text."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from ..bundle.manifest import ImageInfo, VideoInfo
from ..common.errors import BundleError, ImageError
from ..images.load import load_image
from ..images.processors.split import settings_of, split
from ..images.video import Clip, Video, open_with_rate
from ..text.numbers import in_words
from .base import Prepared, Prompt, Source, View, image_list, views_of
from .chat import Media, Medium, lay_out
from .fixed import incomplete
from .parts import gather_media

AROUND, GLOBAL, VIDEO = "<fake_token_around_image>", "<global-img>", "<video>"
SKIPPED = 1
"""Seconds left out at both ends of a long video."""

Written = tuple[str | int, ...]


class SmolVLM:
    """Source of the layout: transformers `SmolVLMProcessor` and `Idefics3Processor`."""

    name = "smolvlm"

    def view(self, bundle: Source, image: Any) -> View:
        """See `Family`; a picture has as many embeddings as its tiles (`Splitting`), a `Video` as its sampled frames. Each
        is a run of the tower, whose input is `pixel_values` float32 [1, 3, side, side]."""
        settings = bundle.manifest.image
        if settings is None:
            raise incomplete(self.name, "image", "text.image_token_id")
        if isinstance(image, Video):
            return video_view(image, settings)
        loaded, splitting = load_image(image), settings_of(settings)
        down, across = splitting.tiles(loaded.height, loaded.width)

        def read() -> tuple[dict[str, np.ndarray], ...]:
            return _one_by_one(split(loaded, settings, splitting))

        written = picture_text(down, across, splitting.tile_embeds)
        count = splitting.tiles_of(down, across) * splitting.tile_embeds
        return View("image", count, read, (down, across), picture=loaded, written=written)

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<image>` and `<video>` themselves, else they come first."""
        settings, mark = bundle.manifest.image, bundle.tokenizer.token(bundle.manifest.text.image_token_id)
        if settings is None or mark is None:
            raise incomplete(self.name, "image", "text.image_token_id")
        given, prompt = gather_media(image_list(image), prompt)
        layout = lay_out(
            bundle, prompt, views_of(self, bundle, given), media(mark, settings.video is not None)
        )
        return Prepared(layout.ids, layout.views, layout.slots if layout.views else None)


def media(mark: str, videos: bool) -> Media:
    """What stands beside text in a prompt of this family; rows of a video have the token of a picture's."""
    pictures = {"image": Medium(mark, mark, "pictures")}
    return pictures | {"video": Medium(VIDEO, VIDEO, "videos", slot=mark)} if videos else pictures


def picture_text(down: int, across: int, tile_embeds: int) -> Written:
    """What a picture of so many rows and columns of tiles becomes; of none, the whole picture alone. Transformers'
    `get_image_prompt_string`."""
    pieces: list[str | int] = []
    for row in range(1, down + 1):
        for column in range(1, across + 1):
            pieces += [f"{AROUND}<row_{row}_col_{column}>", tile_embeds]
        pieces.append("\n")
    begin = "\n" if pieces else ""
    return (*pieces, f"{begin}{AROUND}{GLOBAL}", tile_embeds, AROUND)


@dataclass(frozen=True)
class Frames:
    """What is seen of a video: which frames of `clip`, taken at `rate` a second."""

    clip: Clip
    chosen: list[int]
    rate: float

    @classmethod
    def of(cls, video: Video, info: VideoInfo) -> Frames:
        """Frames at the model's rate, evenly spread, and of a long video none at its ends. As
        `SmolVLMVideoProcessor.sample_frames`.

        Raises ImageError for a video without a rate.
        """
        clip, fps = open_with_rate(video)
        wanted, seconds, last = video.sample_fps or info.fps, clip.count / fps, clip.count - 1
        count = max(1, min(round(wanted * seconds), info.max_frames))
        start, end = 0, last
        if seconds - 2 * SKIPPED > info.max_frames * wanted:
            start, end = int(SKIPPED * fps), min(int(clip.count - SKIPPED * fps), last)
        if start >= end:
            start, end = 0, last
        chosen = np.unique(np.linspace(start, end, count, dtype=int))
        return cls(clip, chosen.tolist(), fps)

    def text(self, tile_embeds: int) -> Written:
        """What the video becomes: how many frames of how long a video, and when each was seen. Transformers'
        `SmolVLMProcessor.replace_video_token`."""
        duration = timedelta(seconds=int(self.clip.count / self.rate))
        pieces: list[str | int] = [
            f"You are provided the following series of {in_words(len(self.chosen))} frames from a {duration} [H:MM:SS] video.\n"
        ]
        for index in self.chosen:
            minutes, seconds = divmod(int(index / self.rate), 60)
            pieces += [f"\nFrame from {minutes:02d}:{seconds:02d}:", *picture_text(0, 0, tile_embeds)]
        return (*pieces, "\n\n")


def video_view(video: Video, settings: ImageInfo) -> View:
    """A video: see `Frames`; each in one tile. The processor of pictures reads them, as the model's authors did."""
    if settings.video is None:
        raise ImageError("this bundle reads pictures only: give the frames as pictures")
    longest = settings.video.extra.get("longest_edge")
    if type(longest) is not int:
        raise BundleError("manifest field 'image.video.longest_edge' must be set; build the bundle again")
    splitting = settings_of(settings).of_frames(longest)
    seen = Frames.of(video, settings.video)

    def read() -> tuple[dict[str, np.ndarray], ...]:
        frames = seen.clip.read(seen.chosen)
        return tuple(run for frame in frames for run in _one_by_one(split(frame, settings, splitting)))

    count = len(seen.chosen)
    written = seen.text(splitting.tile_embeds)
    return View("video", count * splitting.tile_embeds, read, frames=count, written=written)


def _one_by_one(pixel_values: np.ndarray) -> tuple[dict[str, np.ndarray], ...]:
    return tuple({"pixel_values": tile[None]} for tile in pixel_values)
