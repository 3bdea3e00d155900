"""What a caller may take for a picture or a video file: URLs and cameras. The line says what to do instead."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ..common.errors import ImageError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?|[a-z]+/)")  # a letter alone is a drive
_STREAMS = ("rtsp", "rtsps", "rtmp", "rtp", "udp", "tcp", "srt", "v4l2", "mms")
_CAMERA = re.compile(r"(/dev/video)?\d{1,3}")


def check_local(source: Any) -> None:
    """Raises `ImageError` for a path, or a number, that is a URL or a camera and no file."""
    if isinstance(source, int) and not isinstance(source, bool):
        raise _camera(source)
    if not isinstance(source, str | os.PathLike):
        return
    text = os.fspath(source)
    if not isinstance(text, str):
        return  # who reads it says so
    match = _URL.match(text)
    if match is None:
        # A device of the system is no regular file, whether it is plugged in or not.
        if _CAMERA.fullmatch(text) and not Path(text).is_file() and not Path(text).is_dir():
            raise _camera(text)
        return
    scheme = match[1].lower()
    if isinstance(source, os.PathLike) and not match[2].startswith(
        "//"
    ):  # a `Path` keeps one slash of several
        slashes = ":///" if scheme == "file" else "://"
        text = text.replace(":/", slashes, 1)
    if scheme in _STREAMS:
        raise _camera(text)
    if scheme == "file":
        raise ImageError(f"{text:.200}: is a URL: give the path alone, {_path(text):.200}")
    if scheme == "data":
        raise ImageError(
            f"{text:.40}: is a URL of data: give the bytes, base64.b64decode(...) of what follows the comma"
        )
    if match[2].startswith("/"):
        raise ImageError(f"{text:.200}: is a URL, and nothing is downloaded: save it, and give the file")


def _camera(source: object) -> ImageError:
    return ImageError(
        f"{source}: is a camera or a stream, which is not opened here: read its frames, with OpenCV say, and give them as "
        "arrays (image=frame, or Video([...], fps=...); channels='bgr' for OpenCV's)"
    )


def _path(url: str) -> str:
    from urllib.parse import unquote, urlsplit

    return unquote(urlsplit(url).path)
