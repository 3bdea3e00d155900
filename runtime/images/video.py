"""Videos: which of their frames a model sees, read from a list, a folder of pictures or a file.

| `Video.frames` | frames |
|---|---|
| list or tuple of pictures (`images/load.py`), uint8 array [N, H, W, 3] | as they stand |
| folder | its picture files, `frame9.png` before `frame10.png` |
| file | what PyAV decodes, a rotation that the file notes aside; needs the extra [video] |
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from ..errors import ImageError
from ..extras import need_extra
from ..options import check_colour_order, number
from .folder import picture_files
from .load import load_image
from .remote import check_local

SLOWEST, FASTEST = 1e-4, 1000.0
"""Frames per second: one in three hours, and a rate above which it is a mistake."""


@dataclass(frozen=True)
class Video:
    """A video for a request: see the module for `frames`.

    `fps` is the rate at which they were taken, frames per second; a file knows its own. `sample_fps` is the rate at
    which the model sees them, by default its own (2 for Qwen2.5-VL). `channels` is the order of the colours of frames
    that are arrays, "rgb" or "bgr" (OpenCV); that of a request is given beside it.

    Raises `OptionError` for a rate or an order that is none.
    """

    frames: Any
    fps: float | None = None
    sample_fps: float | None = None
    channels: str = "rgb"

    def __post_init__(self) -> None:
        for name in ("fps", "sample_fps"):
            if getattr(self, name) is not None:
                rate = number(f"Video: {name} (frames a second)", getattr(self, name), SLOWEST, FASTEST)
                object.__setattr__(self, name, rate)
        check_colour_order("Video: channels", self.channels)


class Clip(Protocol):
    """An opened video: how many frames it has, at what rate (None: nobody knows)."""

    @property
    def name(self) -> str: ...

    @property
    def count(self) -> int: ...

    @property
    def fps(self) -> float | None: ...

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        """These frames (ascending), upright RGB. Raises `ImageError`."""
        ...


def open_video(video: Video) -> Clip:
    """What `video.frames` holds. Raises `ImageError` naming it and what is wrong, `OptionError` without PyAV."""
    source = video.frames
    check_local(source)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if video.channels != "rgb":
            raise ImageError(
                f"{path}: channels {video.channels!r} is for frames that are arrays, whose order nobody else knows; "
                "leave it out for a file or a folder"
            )
        if path.is_dir():
            return _Frames(str(path), picture_files(path), video.fps)
        if path.is_file():
            return _File(path, video.fps)
        raise ImageError(f"{path}: {'is no video file' if path.exists() else 'no such video file or folder'}")
    if isinstance(source, np.ndarray) and source.ndim == 4:
        source = list(source)
    if not isinstance(source, list | tuple):
        raise ImageError(
            "a video is a file, a folder of pictures, a list of pictures or a uint8 array [N, H, W, 3], not "
            f"{type(source).__name__}"
        )
    return _Frames("the video", source, video.fps, video.channels)


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
        return _alike(
            [
                load_image(self.frames[index], self.channels, f"frame {index} of {self.name}")
                for index in indices
            ],
            self.name,
        )


class _File:
    """A video file, decoded from its start for every reading: seeking is exact in few formats."""

    def __init__(self, path: Path, fps: float | None):
        need_extra("video", "reading a video file")
        self.name, self._path = str(path), path
        with self._opened() as (_, stream):
            rate = stream.average_rate or stream.guessed_rate
            self.fps = fps if fps is not None else (float(rate) if rate else None)
            self.count = stream.frames
        if not self.count:  # not every format says
            self.count = sum(1 for _ in self._decoded())
        if not self.count:
            raise ImageError(f"{path}: the video has no frames")

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        wanted, found = set(indices), []
        for index, frame in enumerate(self._decoded()):
            if index in wanted:
                found.append(load_image(frame.to_image(), name=self.name))
            if len(found) == len(wanted):
                return _alike(found, self.name)
        raise ImageError(
            f"{self.name}: frame {indices[len(found)]} of the {self.count} that the file claims cannot be read"
        )

    def _decoded(self) -> Iterator[Any]:
        with self._opened() as (container, stream):
            yield from container.decode(stream)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        import av

        try:
            # A playlist names further files; none is followed elsewhere.
            with av.open(str(self._path.absolute()), options={"protocol_whitelist": "file"}) as container:
                if not container.streams.video:
                    raise ImageError(f"{self.name}: has no video stream")
                stream = container.streams.video[0]
                stream.thread_type = "AUTO"
                yield container, stream
        except av.FFmpegError as error:
            raise ImageError(f"{self.name}: cannot be read as a video ({error.strerror})") from error


def _alike(frames: list[Image.Image], name: str) -> list[Image.Image]:
    """Frames of one size."""
    for frame in frames:
        if frame.size != frames[0].size:
            raise ImageError(
                f"{name}: its frames are of several sizes, {frames[0].width} x {frames[0].height} and "
                f"{frame.width} x {frame.height}"
            )
    return frames
