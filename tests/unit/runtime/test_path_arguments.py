"""What a caller names by mistake is refused in one line, wherever a path is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.atomic_files import check_folder
from vlmexport.runtime.common.errors import BundleError, ImageError, OptionError, VlmexportError
from vlmexport.runtime.common.paths import MOST_SHOWN, look_at
from vlmexport.runtime.images.endings import ENDINGS, FORMATS
from vlmexport.runtime.images.load import load_image
from vlmexport.runtime.images.video import Video, open_video


class Odd:
    def __fspath__(self) -> Any:
        return b"bytes"


NAMES: dict[str, tuple[Any, str]] = {
    "300 characters": ("a" * 300, "File name too long"),
    "5,000 characters": ("a" * 5000, "File name too long"),
    "a long folder": ("/".join(["a" * 200] * 40), "File name too long"),
    "a NUL": ("a\0b", "null byte"),
    "half a character": ("a\ud800", "not a path|cannot write"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (Bundle.open, BundleError),
        (load_image, ImageError),
        (lambda path: load_image(Path(path)), ImageError),
        (lambda path: open_video(Video(path)), ImageError),
        (lambda path: open_video(Video([path], fps=1)).read([0]), ImageError),
        (lambda path: check_folder("--plot", Path(path)), OptionError),
    ],
)
def test_impossible_file_name_is_refused(
    read: Callable[[Any], object], kind: type[VlmexportError], name: str
) -> None:
    path, reason = NAMES[name]
    with pytest.raises(kind, match=reason) as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < MOST_SHOWN + 200


@pytest.mark.parametrize("path", [7, None, b"bytes", Odd(), 1.5, object(), ["a"]])
def test_non_path_value_is_refused(path: Any) -> None:
    for read, kind in (
        (lambda each: look_at(each, ImageError, "the image"), ImageError),
        (Bundle.open, BundleError),
    ):
        with pytest.raises(kind, match="is not a path"):
            read(path)


def test_existing_file_kinds_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    for name, found in (("file", "file"), ("link", "file"), (".", "folder"), ("pipe", "device"), ("gone", "nothing"),
                        ("file/inside", "nothing"), ("none", "nothing")):  # fmt: skip
        assert look_at(tmp_path / name, ImageError, "it") == (tmp_path / name, found)
    with pytest.raises(ImageError, match=r"it: .*loop is not a path"):
        look_at(tmp_path / "loop", ImageError, "it")
    for read in (load_image, lambda path: open_video(Video(path))):
        for path in (tmp_path / "pipe", "/dev/zero"):
            with pytest.raises(ImageError, match=r"is not a file|is no video file"):
                read(path)


def test_image_suffixes_are_those_of_pillow() -> None:
    Image.init()
    assert {ending for ending, kind in Image.EXTENSION.items() if kind in FORMATS} == ENDINGS


def test_a_masked_array_is_refused() -> None:
    masked = np.ma.masked_array(np.zeros((3, 4, 4, 3), np.uint8), mask=True)
    with pytest.raises(ImageError, match=r"masked array .* fill it first"):
        load_image(masked[0])
    with pytest.raises(ImageError, match=r"masked array .* fill it first"):
        open_video(Video(masked, fps=1)).read([0])
    assert load_image(masked[0].filled(9)).getpixel((0, 0)) == (9, 9, 9)
