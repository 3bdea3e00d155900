"""Damaged and odd videos of many containers, lists of pictures and arrays, read as a request reads them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.mutate import mutate_bytes

from .base import call, picture

SEEDS: dict[str, dict[str, Any]] = {
    "a.mp4": {}, "b.mkv": {"size": (64, 48)}, "c.avi": {}, "d.mov": {"size": (17, 31)}, "e.webm": {"codec": "libvpx"},
    "f.y4m": {"codec": "wrapped_avframe"}, "g.gif": {"codec": "gif", "pixels": "rgb8"}, "h.apng": {"codec": "apng", "pixels": "rgb24"},
    "i.ts": {"codec": "mpeg2video"}, "j.h264": {"codec": "libx264"}, "k.mp4": {"streams": 2}, "l.mkv": {"sound": True},
    "m.mp4": {"sound": True, "streams": 0}, "n.webm": {"codec": "libvpx", "frames": 0}, "o.flv": {"codec": "flv1"}, "p.mjpeg": {"codec": "mjpeg", "pixels": "yuvj420p"},
}  # fmt: skip
"""File name → how it is made (`_written`); an encoder that this FFmpeg has not leaves its file out."""

TITLE, OTHER = b"QQQQQQQQ", b"SSSSSSSS"
"""What stands as metadata of file and stream."""

NUMBERS = (0, 1, 2, 7, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
"""Sizes, counts, durations."""


class Seeds:
    """Small videos, and what else a video may be."""

    def __init__(self, folder: Path):
        self._files = {
            name: data for name, options in SEEDS.items() if (data := _written(folder / name, options))
        }
        self._files["w.webp"] = _webp(folder / "w.webp")
        self._picture = picture(folder / "picture.png").read_bytes()

    def make(self, rng: random.Random, folder: Path) -> Case:
        if rng.random() < 0.15:
            return Case(call(lambda: _read(self._odd(rng, folder), 2.0)))
        name = rng.choice(list(self._files))
        path = folder / (name if rng.random() < 0.9 else rng.choice(list(self._files)))
        data = self._files[name]
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            data = rng.choice(CHANGES)(data, rng)
        path.write_bytes(data)
        fps = rng.choice((None, None, 1e-4, 5.0, 1000.0))
        return Case(call(lambda: _read(path, fps)))

    def _odd(self, rng: random.Random, folder: Path) -> Any:
        """What is no file: lists, arrays, folders."""
        import numpy as np

        array = np.zeros(
            tuple(rng.choice((0, 1, 3, 8)) for _ in range(rng.choice((2, 3, 4, 5)))),
            rng.choice(("u1", "u1", "f4", "?", "O")),
        )
        pictures = [
            mutate_bytes(self._picture, rng) if rng.random() < 0.3 else self._picture for _ in range(3)
        ]
        for at, data in enumerate(pictures):
            (folder / f"frame{at}.png").write_bytes(data)
        return rng.choice(
            (array, np.zeros((3, 8, 8, 3), np.uint8), np.ma.masked_array(np.zeros((2, 4, 4, 3), np.uint8)), pictures,
             folder, [folder / "frame0.png", np.zeros((30, 41, 3), np.uint8)], [], [None], "a" * 400, "a\0b", b"", 7, {}, set())
        )  # fmt: skip


def prepare(folder: Path) -> Seeds:
    """Videos of many containers."""
    import av  # noqa: F401  # a case need not import it

    return Seeds(folder)


def _read(source: Any, fps: float | None) -> None:
    """As a request: the rate, which frames, the first, then all that were chosen."""
    from vlmexport.runtime.images.video import Video, open_video, sampled

    clip = open_video(Video(source, fps=fps))
    chosen = sampled(clip.count, clip.fps or 1.0, 2.0, 4, 16, 2)
    first = clip.read(chosen[:1])
    frames = clip.read(chosen)
    assert len(frames) == len(chosen) and frames[0].tobytes() == first[0].tobytes(), "another first frame"
    assert all(frame.mode == "RGB" and frame.size == frames[0].size for frame in frames)


def _flip(data: bytes, rng: random.Random) -> bytes:
    return mutate_bytes(data, rng)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _metadata(data: bytes, rng: random.Random) -> bytes:
    """Titles in no encoding."""
    for mark in (TITLE, OTHER):
        data = data.replace(
            mark, bytes(rng.choice((0, 0x1B, 0x80, 0xC3, 0xDF, 0xED, 0xFF, 0x41)) for _ in mark)
        )
    return data


def _atoms(data: bytes, rng: random.Random) -> bytes:
    """Another size of a box of MP4, or of a chunk of RIFF."""
    names = (
        b"moov",
        b"trak",
        b"stsz",
        b"stco",
        b"stts",
        b"mdat",
        b"tkhd",
        b"mdhd",
        b"stsd",
        b"mp4v",
        b"avih",
        b"strh",
        b"movi",
        b"idx1",
        b"ANMF",
        b"VP8X",
    )
    found = [at for name in names if (at := data.find(name)) >= 4]
    if not found:
        return _number(data, rng)
    at, order = rng.choice(found), "<" if data[:4] == b"RIFF" else ">"
    place = at + 4 if order == "<" else at - 4
    return data[:place] + struct.pack(f"{order}I", rng.choice(NUMBERS)) + data[place + 4 :]


def _number(data: bytes, rng: random.Random) -> bytes:
    """A number in the header: a width, a count of frames, a duration."""
    at = rng.randrange(max(1, min(len(data), 600)))
    form = rng.choice((">I", "<I", ">H", "<H"))
    size = struct.calcsize(form)
    return data[:at] + struct.pack(form, rng.choice(NUMBERS) & (256**size - 1)) + data[at + size :]


def _header(data: bytes, rng: random.Random) -> bytes:
    """Of a raw stream, whose header is words."""
    if not data.startswith(b"YUV4MPEG2"):
        return _number(data, rng)
    words = rng.choice(
        (
            b"W30000 H30000",
            b"W0 H0",
            b"W-1 H2",
            b"W16 H16 F0:0",
            b"W16 H16 F1:4294967295",
            b"W99999999 H1",
            b"W15 H17",
        )
    )
    return b"YUV4MPEG2 " + words + data[data.index(b"\n") :]


def _joined(data: bytes, rng: random.Random) -> bytes:
    return data + data[rng.randrange(len(data) + 1) :] * rng.choice((1, 3))


CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip, _flip, _cut, _metadata, _atoms, _atoms, _number, _number, _header, _joined,
)  # fmt: skip


def _written(path: Path, options: dict[str, Any]) -> bytes:
    """Some frames of 32 x 32; nothing where this FFmpeg cannot write them."""
    import av
    import numpy as np

    width, height = options.get("size", (32, 32))
    pixels = options.get("pixels", "yuv420p")
    try:
        with av.open(str(path), "w") as out:
            out.metadata["title"] = TITLE.decode()
            streams = [
                out.add_stream(options.get("codec", "mpeg4"), rate=5)
                for _ in range(options.get("streams", 1))
            ]
            for stream in streams:
                stream.width, stream.height, stream.pix_fmt = width, height, pixels
                stream.metadata["handler_name"] = OTHER.decode()
            if options.get("sound"):
                sound = out.add_stream("aac", rate=8000)
                samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
                samples.rate = 8000
                out.mux(sound.encode(samples))
                out.mux(sound.encode())
            out.start_encoding()  # also of a file without frames
            for at in range(options.get("frames", 6)):
                values = np.random.default_rng(at).integers(0, 256, (height, width, 3), dtype=np.uint8)
                frame = av.VideoFrame.from_ndarray(values, format="rgb24").reformat(format=pixels)
                for stream in streams:
                    out.mux(stream.encode(frame))
            for stream in streams:
                out.mux(stream.encode())
    except (av.FFmpegError, ValueError):
        return b""
    return path.read_bytes()


def _webp(path: Path) -> bytes:
    import numpy as np
    from PIL import Image

    frames = [Image.fromarray(np.full((32, 32, 3), 20 * at, np.uint8)) for at in range(6)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=200, lossless=True)
    return path.read_bytes()
