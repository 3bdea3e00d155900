"""Values that are typed as text: sizes of memory, and lists of layers."""

from __future__ import annotations

import re

from ...runtime.common.errors import OptionError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str, option: str) -> int:
    """`4GiB`, `512M`, `0` → bytes (binary units). Raises OptionError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise OptionError(f"{option} {text!r} is not a size; write 4GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_layers(text: str, option: str) -> list[int]:
    """`3,5,8` → numbers of layers. Raises OptionError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise OptionError(f"{option} {text!r:.80} is no list of layers; write 3,5,8")
    return [int(part) for part in parts]
