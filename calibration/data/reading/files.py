"""Files of data that are read whole, each up to a bound that no published one reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....exporter.common.memory import available_memory
from ....runtime.common.bounded_files import decoded, parse_json, read_whole
from ....runtime.common.errors import OptionError
from ....runtime.common.paths import path_text

LARGEST_DOCUMENT = 4 << 30
"""Bytes of a JSON file. LLaVA's mix of 665,000 conversations has one GB, COCO's captions have 90 MB."""
LARGEST_LIST = 64 << 20
"""Bytes of a file of lines, which are held all at once. Flickr30k's captions have 20 MB."""
SMALL = 64 << 20
"""Bytes of a JSON file whose memory nobody asks for."""


def read_json(path: Path) -> Any:
    """What a JSON file holds, or a pipe that somebody writes. Raises OptionError with one line where it cannot be read, is
    longer than `LARGEST_DOCUMENT` or than memory, or is not JSON."""
    data = read_whole(path, LARGEST_DOCUMENT, OptionError, pipes=True)
    check_memory(path, data, available_memory())
    try:
        return parse_json(data)
    except ValueError as error:
        raise OptionError(f"{path_text(path)} is not JSON: {error}") from error


def check_memory(path: Path, data: bytes, available: int | None) -> None:
    """OptionError where the document may take more than the `available` bytes (None: nobody knows)."""
    needed = parsed_bytes(data) if len(data) > SMALL else 0
    if available is not None and needed > available:
        raise OptionError(
            f"{path_text(path)} may take {needed / 1e9:.1f} GB of memory when it is read, and {available / 1e9:.1f} GB are free; "
            "split it into smaller files"
        )


def parsed_bytes(data: bytes) -> int:
    """About what a JSON text takes when it is read: itself, its strings, and Python's objects for lists, objects, their
    names and values. More than that for texts with many commas."""
    objects = 60 * data.count(b"[") + 60 * data.count(b"{") + 90 * data.count(b'":') + 40 * data.count(b",")
    return 2 * len(data) + objects


def read_lines(path: Path, damaged: bool = False) -> list[str]:
    """The lines of a text; bytes that are no UTF-8 are replaced where it may be `damaged`. Raises OptionError with one
    line."""
    data = read_whole(path, LARGEST_LIST, OptionError, pipes=True)
    if damaged:
        return data.decode("utf-8-sig", "replace").splitlines()
    try:
        return decoded(data).splitlines()
    except ValueError as error:
        raise OptionError(f"{path_text(path)} is not text: {error}") from error
