"""Lines of JSON from anyone: bounded in length and depth, and text that every tokenizer can read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ....runtime.common.bounded_files import opened, parse_json
from ....runtime.common.errors import OptionError, PromptError
from ....runtime.text.prompt import as_text
from .records import Problems

LONGEST_LINE = 8 << 20
"""Bytes: a prompt of a million characters (the runtime's limit), each written as an escape, fits. Objects in memory are
some seventy times as large as their text can be."""

MARKED = "utf-8-sig"
"""UTF-8, with or without the byte order mark that spreadsheets and editors of Windows put before it."""


def json_lines(path: Path, problems: Problems) -> Iterator[tuple[int, Any]]:
    """(number from 1, value) of every line that is not blank; others are reported. Raises OptionError where the file
    cannot be read."""
    with opened(path, OptionError, pipes=True) as lines:
        number = 0
        while line := lines.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                what = f"the line has more than {LONGEST_LINE >> 20} MiB; give shorter texts, a line each"
                problems.report(f"{path}:{number}", what)
                _skip(lines, line)
            elif line.strip():
                try:
                    value = parse_json(line)
                except ValueError as error:
                    problems.report(f"{path}:{number}", str(error))
                    continue
                yield number, value


def _skip(lines: BinaryIO, line: bytes) -> None:
    """Reads on to the end of a line that is too long."""
    while line and not line.endswith(b"\n"):
        line = lines.readline(1 << 20)


def checked_text(name: str, text: str) -> str:
    """`text`, which is valid Unicode and no longer than a prompt may be; ValueError otherwise."""
    try:
        return as_text(text)
    except PromptError as error:
        raise ValueError(f"field {name!r}: {error}") from error
