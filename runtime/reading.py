"""Files of anyone's that are read whole: of a bounded size, and no device; and JSON in them."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import VlmexportError

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


def read_whole(path: Path, most: int, failure: type[VlmexportError], pipes: bool = False) -> bytes:
    """The bytes of a regular file, `most` at most; with `pipes` also of a pipe until its writer closes it.

    Raises `failure` with one line for anything else: a folder, a device, a pipe that nobody writes into for `PIPE_WAIT`
    seconds, a longer file.
    """
    try:
        with _opened(path, pipes) as (file, begun):
            held = bytearray(begun)
            if os.fstat(file).st_size <= most:
                while len(held) <= most and (chunk := os.read(file, _CHUNK)):
                    held += chunk
                if len(held) <= most:
                    return bytes(held)
    except _Unfit as error:
        raise failure(f"{shown(path)} {error}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise  # not the system's: a signal handler's
        reason = error.strerror if isinstance(error, OSError) else "no file can have that name"
        raise failure(f"{shown(path)} cannot be read: {reason}") from error
    raise failure(f"{shown(path)} has more than {_size(most)}; no such file is so long")


def read_json(path: Path, most: int, failure: type[VlmexportError]) -> Any:
    """What a regular JSON file of at most `most` bytes holds. Raises `failure` with one line where it is no such file."""
    data = read_whole(path, most, failure)
    try:
        return parse_json(data)
    except ValueError as error:
        raise failure(f"{shown(path)} is not JSON: {error}") from error


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


def shown(path: object) -> str:
    """A path in a message: one line, not too long."""
    text = str(path)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 200 else f"{text[:150]}… ({len(text)} characters)"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for name, value in pairs:
            if value != found[name]:
                raise TextError(f"an object gives the name {name!r:.80} twice, with different values")
    return found


class _Unfit(Exception):
    """What the path names is nothing that can be read whole."""


@contextlib.contextmanager
def _opened(path: Path, pipes: bool) -> Iterator[tuple[int, bytes]]:
    """(descriptor of the file, what was read of it already). Raises _Unfit, OSError, ValueError."""
    _check_kind(path.stat().st_mode, pipes)  # before it is opened: to open a device may do something
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(file).st_mode
        _check_kind(mode, pipes)
        begun = b""
        if stat.S_ISFIFO(mode):
            begun = _first(file)
            os.set_blocking(file, True)
        yield file, begun
    finally:
        os.close(file)


def _check_kind(mode: int, pipes: bool) -> None:
    if not stat.S_ISREG(mode) and not (pipes and stat.S_ISFIFO(mode)):
        raise _Unfit("is not a regular file")


def _first(pipe: int) -> bytes:
    """The first bytes of a pipe, none where its writer has written none yet. Raises _Unfit where there is no writer."""
    end = time.monotonic() + PIPE_WAIT
    while True:
        try:
            found = os.read(pipe, _CHUNK)
        except BlockingIOError:  # somebody has opened it
            return b""
        if found:
            return found
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
