"""A part of what several processes or machines share without talking to each other: `--part I/N`."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from .errors import OptionError

MOST = 1 << 20
"""Parts. More would be a typing error."""

METAVAR = "I/N"
"""How help pages write a part."""


@dataclass(frozen=True)
class Part:
    """One of `count` parts, numbered from 0 as schedulers number the tasks of an array. Which part a key belongs to depends
    on the key alone."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def holds(self, key: str) -> bool:
        """Whether what has this key belongs to the part."""
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.count == self.number


def read_part(name: str, value: Any) -> Part:
    """The part that a text such as `0/4` names; a `Part` is one already. Raises `OptionError`, which calls the option
    `name`."""
    if isinstance(value, Part):
        return value
    found = re.fullmatch(r"([0-9]{1,7})/([0-9]{1,7})", value if isinstance(value, str) else "", re.ASCII)
    if found is None:
        raise OptionError(f"{name} {value!r:.40} is not I/N, such as 0/4 for the first of four parts")
    number, count = map(int, found.groups())
    if not 1 <= count <= MOST:
        raise OptionError(f"{name} {value}: there are 1 to {MOST:,} parts")
    if number >= count:
        raise OptionError(f"{name} {value}: the parts are 0/{count} to {count - 1}/{count}")
    return Part(number, count)
