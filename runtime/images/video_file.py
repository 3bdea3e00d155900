"""Video files, by PyAV; animated WebP, which FFmpeg does not read, by Pillow."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from ..common.errors import ImageError, VlmexportError
from ..common.foreign_errors import raise_if_foreign
from ..common.optional_deps import need_extra
from .load import MAX_PIXELS, load_image, opened, reason

log = logging.getLogger(__name__)


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


def open_file(path: Path, fps: float | None) -> Clip:
    """A video file; `fps` takes the place of its own rate. Raises `ImageError`, and `OptionError` without PyAV."""
    return AnimatedWebp(path, fps) if _is_animated_webp(path) else VideoFile(path, fps)


_NAMING_OTHERS = frozenset(
    ("hls", "dash", "concat", "concatf", "imf", "sdp", "rtsp", "lavfi", "avisynth", "vapoursynth")
)
"""Formats of files that name further files or places: playlists and scripts."""


def _input_options() -> dict[str, str]:
    """FFmpeg's options for reading one file and no other."""
    import av

    formats = ",".join(sorted(av.formats_available - _NAMING_OTHERS))
    return {"protocol_whitelist": "file", "format_whitelist": formats, "pattern_type": "none"}


class VideoFile:
    """What PyAV decodes, from its start for every reading: seeking is exact in few formats."""

    def __init__(self, path: Path, fps: float | None):
        need_extra("video", "reading a video file")
        self.name, self._path = str(path), path
        with self._opened() as (_, stream):
            rate = stream.average_rate or stream.guessed_rate
            self.fps = fps if fps is not None else (float(rate) if rate else None)
            self.count = stream.frames
            self._apart = stream.codec_context.name == "rawvideo"
            """Whether each packet is a frame, whatever came before: only those that are wanted are decoded then."""
        if self.count <= 0:  # not every format says
            self.count = self._counted()
        if not self.count:
            raise ImageError(f"{path}: the video has no frames")

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        index_set, pictures = set(indices), []
        for index, frame in self._frames(index_set):
            if index in index_set:
                pictures.append(load_image(self._picture(frame), name=self.name))
            if len(pictures) == len(index_set):
                return alike(pictures, self.name)
        raise ImageError(
            f"{self.name}: frame {indices[len(pictures)]} of the {self.count} that the file claims cannot be read"
        )

    def _counted(self) -> int:
        if self._apart:
            with self._opened() as (container, stream):
                return sum(1 for packet in container.demux(stream) if packet.size)
        log.debug(
            "%s: the file does not say how many frames it has, so all are decoded to count them", self.name
        )
        return sum(1 for _ in self._frames())

    def _frames(self, wanted: set[int] | None = None) -> Iterator[tuple[int, Any]]:
        """Frames with their numbers; where each lies apart, those that are `wanted`."""
        with self._opened() as (container, stream):
            if not self._apart or wanted is None:
                yield from enumerate(container.decode(stream))
                return
            packets = (packet for packet in container.demux(stream) if packet.size)
            for index, packet in enumerate(packets):
                if index in wanted:
                    yield from ((index, frame) for frame in packet.decode())

    def _picture(self, frame: Any) -> Image.Image:
        _check_size(frame.width, frame.height, self.name)
        with self._translated():
            return frame.to_image()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        import av

        # Titles are nobody's business here, and cameras write them in any encoding.
        options: dict[str, Any] = {"options": _input_options(), "metadata_errors": "replace"}
        with self._translated(), av.open(str(self._path.absolute()), **options) as container:
            if not container.streams.video:
                raise ImageError(f"{self.name}: has no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise ImageError(f"{self.name}: PyAV has no decoder for its video stream")
            _check_size(stream.codec_context.width, stream.codec_context.height, self.name)
            stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}  # a stream may change its size
            stream.thread_type = "AUTO"
            yield container, stream

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """What PyAV raises becomes an `ImageError`: FFmpeg's errors, and many others for damaged files."""
        try:
            yield
        except VlmexportError:
            raise
        except Exception as error:
            raise_if_foreign(error)
            message = getattr(error, "strerror", None) or reason(error)
            raise ImageError(f"{self.name}: cannot be read as a video ({message})") from error


class AnimatedWebp:
    """What Pillow decodes, from its start for every reading."""

    def __init__(self, path: Path, fps: float | None):
        self.name, self._path = str(path), path
        with self._opened() as image:
            self.count = int(getattr(image, "n_frames", 1))
            self.fps = self._rate(image) if fps is None else fps

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        with self._opened() as image:
            return alike([self._frame(image, index) for index in indices], self.name)

    def _rate(self, image: Image.Image) -> float | None:
        """Frames a second on average; None where it says that all are shown at once."""
        self._seek(image, self.count - 1)
        milliseconds = image.info.get("timestamp", 0) + image.info.get("duration", 0)
        return 1000 * self.count / milliseconds if milliseconds > 0 else None

    def _frame(self, image: Image.Image, index: int) -> Image.Image:
        self._seek(image, index)
        return load_image(image, name=self.name)

    def _seek(self, image: Image.Image, index: int) -> None:
        try:
            image.seek(index)
            image.load()
        except Exception as error:
            raise_if_foreign(error)
            raise ImageError(
                f"{self.name}: frame {index} of the {self.count} that the file claims cannot be read ({reason(error)})"
            ) from error

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        with opened(self._path, self.name) as image:
            _check_size(image.width, image.height, self.name)
            yield image


def alike(frames: list[Image.Image], name: str) -> list[Image.Image]:
    """Frames of one size."""
    for frame in frames:
        if frame.size != frames[0].size:
            raise ImageError(
                f"{name}: its frames are of several sizes, {frames[0].width} x {frames[0].height} and "
                f"{frame.width} x {frame.height}"
            )
    return frames


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{name}: frames of {width} x {height} pixels; the limit is {MAX_PIXELS // 1_000_000} megapixels; scale them down"
        )


def _is_animated_webp(path: Path) -> bool:
    """By the flag of its header."""
    try:
        with path.open("rb") as file:
            head = file.read(21)
    except OSError as error:
        raise_if_foreign(error)
        raise ImageError(f"{path}: cannot be read ({error.strerror})") from error
    return head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) == 21 and bool(head[20] & 2)
