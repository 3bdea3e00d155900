"""Video files of many containers: titles in no encoding, damage, raw streams, animated WebP, signals."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime.common.errors import ImageError
from vlmexport.runtime.images import video_file
from vlmexport.runtime.images.video import Video, open_video
from vlmexport.runtime.images.video_file import VideoFile

av = pytest.importorskip("av", reason="writing a video needs [video]")

CONTAINERS = {
    "mp4": "mpeg4", "mov": "mpeg4", "mkv": "mpeg4", "avi": "mpeg4", "webm": "libvpx", "ts": "mpeg2video", "nut": "mpeg4", "flv": "flv1",
}  # fmt: skip
TITLE, OTHER = b"QQQQQQQQ", b"SSSSSSSS"
FRAMES = [np.full((48, 64, 3), 20 * at, np.uint8) for at in range(6)]


def written(path: Path, codec: str, count: int = 6) -> Path:
    """Frames at 5 a second, with a title of the file and a name of its stream."""
    with av.open(str(path), "w") as out:
        out.metadata["title"] = TITLE.decode()
        stream = out.add_stream(codec, rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for key in ("handler_name", "title", "service_name"):
            stream.metadata[key] = OTHER.decode()
        for values in FRAMES[:count]:
            out.mux(
                stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24").reformat(format="yuv420p"))
            )
        out.mux(stream.encode())
    return path


@pytest.mark.parametrize("container", CONTAINERS)
def test_undecodable_video_titles_are_ignored(tmp_path: Path, container: str) -> None:
    path = written(tmp_path / f"clip.{container}", CONTAINERS[container])
    right = open_video(Video(path)).read(range(6))
    data = path.read_bytes()
    for title in (b"Stra\xdfe 1", b"\xff\xfe\xdf\xc3\x80\x00\xed\xa0"):
        path.write_bytes(data.replace(TITLE, title).replace(OTHER, title[::-1]))
        clip = open_video(Video(path))
        assert (clip.count, clip.fps) == (6, 5)
        for frame, want in zip(clip.read(range(6)), right, strict=True):
            np.testing.assert_array_equal(frame, want)
    assert container in ("flv", "ts") or TITLE in data or OTHER in data, "no title was written"


@pytest.mark.parametrize("container", ["mp4", "avi", "mkv", "webm"])
def test_a_cut_video_is_refused_in_one_line_or_read(tmp_path: Path, container: str) -> None:
    data = written(tmp_path / f"clip.{container}", CONTAINERS[container]).read_bytes()
    path, refused = tmp_path / f"cut.{container}", 0
    for end in range(0, len(data), len(data) // 12):
        path.write_bytes(data[:end])
        try:
            clip = open_video(Video(path, fps=5))
            assert len(clip.read(range(clip.count))) == clip.count
        except ImageError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
    assert refused


class Late(Exception):
    pass


@pytest.mark.parametrize("kind", [Late, RuntimeError, ValueError, TimeoutError, UnicodeDecodeError])
def test_host_program_exceptions_pass_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    path = written(tmp_path / "clip.mp4", "mpeg4")
    raised = kind("utf-8", b"x", 0, 1, "late") if kind is UnicodeDecodeError else kind("late")

    def handler(*_: object) -> None:
        raise raised

    def interrupted(self: Any, frame: Any) -> Image.Image:
        with self._translated():
            signal.raise_signal(signal.SIGALRM)
            return frame.to_image()

    before = signal.signal(signal.SIGALRM, handler)
    monkeypatch.setattr(VideoFile, "_picture", interrupted)
    # The handler's frame must lie behind one of ours, as where a signal comes while PyAV works.
    try:
        with pytest.raises(kind) as caught:
            open_video(Video(path)).read([0, 1])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught.value is raised


def test_pyav_errors_become_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "clip.mp4", "mpeg4")
    for error in (
        "ValueError('odd')",
        "ZeroDivisionError()",
        "RuntimeError('two\\nlines')",
        "MemoryError()",
        "KeyError(1)",
    ):
        space: dict[str, Any] = {"__name__": "av.container.core"}
        exec(f"def failing(*_, **__): raise {error}", space)
        monkeypatch.setattr(av, "open", space["failing"])
        with pytest.raises(ImageError, match=r"clip\.mp4: cannot be read as a video \(") as caught:
            open_video(Video(path))
        assert "\n" not in str(caught.value)


def test_raw_streams_decode_only_sampled_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "long.y4m"
    with path.open("wb") as file:
        file.write(b"YUV4MPEG2 W16 H16 F25:1 C420jpeg\n")
        for at in range(300):
            file.write(b"FRAME\n" + bytes([at % 200]) * 256 + b"\x80" * 128)
    with monkeypatch.context() as patch:
        patch.setattr(VideoFile, "_frames", lambda *_: pytest.fail("decoded to be counted"))
        clip = open_video(Video(path))
    assert isinstance(clip, VideoFile) and (clip.count, clip.fps) == (300, 25)
    assert [index for index, _ in clip._frames({7, 100, 299})] == [7, 100, 299]
    found = clip.read([7, 100, 299])
    with av.open(str(path)) as container:
        every = [frame.to_image() for frame in container.decode(video=0)]
    for frame, index in zip(found, (7, 100, 299), strict=True):
        np.testing.assert_array_equal(frame, every[index])
    raw = written(tmp_path / "clip.ts", "mpeg2video")
    with caplog.at_level(logging.DEBUG, "vlmexport"):
        assert open_video(Video(raw)).count == 6
    assert "all are decoded to count them" in caplog.text


def test_huge_frames_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "clip.mp4", "mpeg4")
    monkeypatch.setattr(video_file, "MAX_PIXELS", 64 * 48 - 1)
    monkeypatch.setattr(VideoFile, "_frames", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ImageError, match=r"clip\.mp4: frames of 64 x 48 pixels; the limit is 0 megapixels"):
        open_video(Video(path))


@pytest.mark.parametrize("name", ["list.m3u8", "list.ffconcat", "frame%d.png"])
def test_playlist_files_are_refused(tmp_path: Path, name: str) -> None:
    """Not even one that is there: it could lie anywhere."""
    made = tmp_path / "film.ts"
    with av.open(str(made), "w") as out:
        stream = out.add_stream("mpeg2video", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        for packet in (*(p for _ in range(6) for p in stream.encode(frame)), *stream.encode()):
            out.mux(packet)
    Image.new("RGB", (8, 8)).save(tmp_path / "frame0.png")
    assert open_video(Video(made)).count == 6
    text = {
        "list.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{made}\n#EXT-X-ENDLIST\n",
        "list.ffconcat": "ffconcat version 1.0\nfile film.ts\n",
    }
    if name in text:
        (tmp_path / name).write_text(text[name])
    with pytest.raises(ImageError):
        open_video(Video(tmp_path / name))


def test_an_animated_webp_is_a_video(tmp_path: Path) -> None:
    path = tmp_path / "clip.webp"
    first, *others = [Image.fromarray(values) for values in FRAMES]
    first.save(path, save_all=True, append_images=others, duration=250, lossless=True)
    clip = open_video(Video(path))
    assert (clip.count, clip.fps) == (6, 4)
    assert open_video(Video(path, fps=9)).fps == 9
    for index, frame in zip((0, 3, 5), clip.read([0, 3, 5]), strict=True):
        np.testing.assert_array_equal(frame, FRAMES[index])
    data = path.read_bytes()
    for end in (30, len(data) // 2, len(data) - 3):
        path.write_bytes(data[:end])
        with pytest.raises(ImageError, match=r"clip\.webp: .*cannot be read"):
            open_video(Video(path)).read(range(6))
    pictures: tuple[dict[str, Any], ...] = ({}, {"exif": Image.Exif().tobytes(), "icc_profile": b"x" * 200})
    for options in pictures:
        first.save(path, **options)  # a picture: FFmpeg reads it
        clip = open_video(Video(path))
        assert clip.count == 1 and isinstance(clip, VideoFile)
