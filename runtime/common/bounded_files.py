"""Files of anyone's that are read whole: of a bounded size, and no device; and JSON in them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import VlmexportError
from .foreign_errors import raise_if_foreign
from .paths import path_text

PIPE_WAIT = 2.0
"""Seconds that a pipe is waited for which nobody has opened to write."""
_CHUNK = 1 << 20
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


@contextlib.contextmanager
def opened(path: Path, failure: type[VlmexportError], pipes: bool = False) -> Iterator[BinaryIO]:
    """A regular file; with `pipes` also a pipe that somebody has opened to write, which ends where its writer closes it.

    Raises `failure` with one line for anything else: a folder, a device, a pipe that nobody writes into for `PIPE_WAIT`
    seconds; and for what the system says while the block reads.
    """
    with _told(path, failure):
        file = _descriptor(path, pipes)
    try:
        with _told(path, failure):
            begun = _first(file) if stat.S_ISFIFO(os.fstat(file).st_mode) else b""
            yield io.BufferedReader(_Behind(begun, file), _CHUNK)
    finally:
        os.close(file)


def read_whole(path: Path, most: int, failure: type[VlmexportError], pipes: bool = False) -> bytes:
    """The bytes of what `opened` opens, `most` at most. Raises `failure` as that does, and for a longer file."""
    content = bytearray()
    with opened(path, failure, pipes) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise failure(too_long(path, most))
        while len(content) <= most and (chunk := file.read1(_CHUNK)):  # type: ignore[attr-defined]
            content += chunk
    if len(content) > most:
        raise failure(too_long(path, most))
    return bytes(content)


def too_long(path: Path, most: int) -> str:
    """The line that refuses a file of more than `most` bytes."""
    return f"{path_text(path)} has more than {_size(most)}; no such file is so long"


def read_json(path: Path, most: int, failure: type[VlmexportError]) -> Any:
    """What a regular JSON file of at most `most` bytes holds. Raises `failure` with one line where it is no such file."""
    data = read_whole(path, most, failure)
    try:
        return parse_json(data)
    except ValueError as error:
        raise_if_foreign(error)
        raise failure(f"{path_text(path)} is not JSON: {error}") from error


def parse_json(data: bytes | bytearray) -> Any:
    """The value of a JSON text in UTF-8, with or without a byte order mark. Raises ValueError with one line, also for an
    object that gives a name twice with different values."""
    try:
        return json.loads(decoded(data), object_pairs_hook=_object)
    except (json.JSONDecodeError, TextError):
        raise
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except MemoryError:
        raise ValueError("it takes more memory than there is") from None
    except ValueError as error:
        raise_if_foreign(error)
        digits = getattr(sys, "get_int_max_str_digits", lambda: 4300)()
        raise ValueError(f"it holds a number of more than {digits} digits") from error


def decoded(data: bytes | bytearray) -> str:
    """A text in UTF-8, with or without a byte order mark. Raises TextError (a ValueError) with one line that names what
    the bytes look like."""
    packed = next((kind for mark, kind in _PACKED.items() if data.startswith(mark)), None)
    if packed:
        raise TextError(f"it is compressed ({packed}); unpack it")
    kind = json.detect_encoding(bytes(data[:4]))
    if not kind.startswith("utf-8"):
        raise TextError(f"it is {kind[:6]}; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"byte {error.start} is not UTF-8; save it as UTF-8") from error


class TextError(ValueError):
    """Bytes that are no text, or a text that contradicts itself."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        for name, value in pairs:
            if value != members[name]:
                raise TextError(f"an object gives the name {name!r:.80} twice, with different values")
    return members


class _Unfit(Exception):
    """What the path names is nothing that can be read whole."""


class _Behind(io.RawIOBase):
    """A descriptor of which some bytes were read already."""

    def __init__(self, begun: bytes, file: int) -> None:
        self._begun, self._file = begun, file

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file

    def readinto(self, into: Any) -> int:
        data = self._begun[: len(into)] or os.read(self._file, len(into))
        self._begun = self._begun[len(data) :]
        into[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def _told(path: Path, failure: type[VlmexportError]) -> Iterator[None]:
    """Turns what is wrong with a file into `failure` with one line."""
    try:
        yield
    except _Unfit as error:
        raise failure(f"{path_text(path)} {error}") from None
    except OSError as error:
        raise_if_foreign(error)
        raise failure(f"{path_text(path)} cannot be read: {error.strerror}") from error


def _descriptor(path: Path, pipes: bool) -> int:
    """Of the opened file. Raises _Unfit, OSError."""
    try:
        kind = path.stat().st_mode  # before it is opened: to open a device may do something
        _check_kind(kind, pipes)
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:  # NUL, or half of a surrogate pair
        raise_if_foreign(error)
        raise _Unfit("cannot be read: no file can have that name") from None
    try:
        _check_kind(os.fstat(file).st_mode, pipes)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_kind(mode: int, pipes: bool) -> None:
    if not stat.S_ISREG(mode) and not (pipes and stat.S_ISFIFO(mode)):
        raise _Unfit("is not a regular file")


def _first(pipe: int) -> bytes:
    """The first bytes of a pipe, none where its writer has written none yet. Raises _Unfit where there is no writer."""
    end = time.monotonic() + PIPE_WAIT
    while True:
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:  # somebody has opened it
            os.set_blocking(pipe, True)
            return b""
        if data:
            os.set_blocking(pipe, True)
            return data
        if time.monotonic() >= end:
            raise _Unfit(f"is a pipe that nobody writes into (waited {PIPE_WAIT:g} s), not a regular file")
        time.sleep(0.01)


def _size(count: int) -> str:
    return (
        f"{count >> 30} GiB"
        if count >= 1 << 30
        else f"{count >> 20} MiB"
        if count >= 1 << 20
        else f"{count} bytes"
    )
