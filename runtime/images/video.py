"""Videos: which of their frames a model sees, read from a list, a folder of pictures or a file.

| `Video.frames` | frames |
|---|---|
| list or tuple of pictures (`images/load.py`), uint8 array [N, H, W, 3] | as they stand |
| folder | its picture files, `frame9.png` before `frame10.png` |
| file | what PyAV decodes, a rotation that the file notes aside; needs the extra [video] |
| animated WebP | what Pillow decodes |
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ..common.errors import ImageError
from ..common.paths import look_at, path_text
from .folder import picture_files
from .load import load_image
from .remote import check_local
from .video_file import Clip as Clip
from .video_file import alike, open_file
from .video_input import Video as Video


def open_video(video: Video) -> Clip:
    """What `video.frames` holds. Raises `ImageError` naming it and what is wrong, `OptionError` without PyAV."""
    source = video.frames
    check_local(source)
    if isinstance(source, str | os.PathLike):
        path, kind = look_at(source, ImageError, "the video")
        name = path_text(path)
        if video.channels != "rgb":
            raise ImageError(
                f"{name}: channels {video.channels!r} is for frames that are arrays, whose order nobody else knows; "
                "leave it out for a file or a folder"
            )
        if kind == "folder":
            return _Frames(name, picture_files(path), video.fps)
        if kind == "file":
            return open_file(path, video.fps)
        raise ImageError(
            f"{name}: {'is no video file' if kind == 'device' else 'no such video file or folder'}"
        )
    if isinstance(source, np.ndarray) and source.ndim == 4:
        source = list(source)
    if not isinstance(source, list | tuple):
        raise ImageError(
            "a video is a file, a folder of pictures, a list of pictures or a uint8 array [N, H, W, 3], not "
            f"{type(source).__name__}"
        )
    return _Frames("the video", source, video.fps, video.channels)


def open_with_rate(video: Video) -> tuple[Clip, float]:
    """(what the video holds, frames per second). Raises `ImageError` where nobody knows the rate."""
    clip = open_video(video)
    if clip.fps is None:
        raise ImageError(f"{clip.name}: nobody knows its rate; give Video(frames, fps=...) (--video-fps)")
    return clip, clip.fps


def sampled(count: int, fps: float, wanted: float, least: int, most: int, group: int) -> list[int]:
    """Which of `count` frames, taken at `fps`, are seen at `wanted` frames a second: at least `least` and at most `most`
    where there are so many, in whole `group`s, evenly spread. All of a video that is shorter than a group.

    As transformers' `Qwen2VLVideoProcessor.sample_frames`, which counts one frame too many where its steps round down.
    """
    chosen = min(max(count / fps * wanted, least), most // group * group, count)
    number = int(chosen) // group * group or count
    return [index * count // number for index in range(number)]


@dataclass(frozen=True)
class _Frames:
    """Frames that are there, or are read from a file each."""

    name: str
    frames: Sequence[Any]
    fps: float | None
    channels: str = "rgb"

    @property
    def count(self) -> int:
        return len(self.frames)

    def __post_init__(self) -> None:
        if not self.frames:
            raise ImageError(f"{self.name}: has no frames")

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        return alike(
            [
                load_image(self.frames[index], self.channels, f"frame {index} of {self.name}")
                for index in indices
            ],
            self.name,
        )
