"""What a command line finds around it: its streams, and the size of the terminal."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import IO

NARROWEST = 10
"""Columns of a terminal that are believed."""


def open_closed_streams() -> None:
    """Streams that are closed lead nowhere; a console that cannot show a character shows "?"."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # started with the stream closed (`>&-`)
            # Its number is taken in any case, or the next file that is opened would get what is written to it.
            nowhere = open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115
            setattr(sys, name, ClosedOutput(nowhere) if name == "stdout" else nowhere)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A console that cannot show a character shows "?" instead of failing.
            stream.reconfigure(errors="replace")


def forget_odd_sizes() -> None:
    """What libraries would take for the size of the terminal and no line would fit in, or is no number: it has its own."""
    for name in ("COLUMNS", "LINES"):
        value = os.environ.get(name)
        number = int(value) if value and value.isascii() and value.isdecimal() and len(value) < 6 else 0
        if value is not None and number < (NARROWEST if name == "COLUMNS" else 1):
            del os.environ[name]


class ClosedOutput(io.TextIOBase):
    """In place of a standard output that is closed: results that are written there are not lost without a word."""

    def __init__(self, nowhere: IO[str]):
        self._nowhere = nowhere

    def write(self, text: str) -> int:
        if text:
            raise OSError(errno.EBADF, "is closed; lead it to a file, or to /dev/null", "standard output")
        return 0
