"""What stands behind the colon of `--data FORM:…`: places, then options, as the form's usage says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ....runtime.common.errors import OptionError


@dataclass(frozen=True)
class Arguments:
    """`places` in their order (those that may be missing, last) and `options` by name."""

    form: str
    places: tuple[str, ...]
    options: Mapping[str, str]

    def path(self, number: int) -> Path:
        """A place that must be given."""
        return Path(self.places[number])

    def place(self, number: int) -> str | None:
        """A place that may be missing."""
        return self.places[number] if number < len(self.places) else None

    def count(self, name: str, default: int | None = None) -> int | None:
        """An option that is a number from 1 on. Raises OptionError for anything else."""
        text = self.options.get(name)
        if text is None:
            return default
        if not text.isdecimal() or not 1 <= int(text[:10]) < 10**9:
            raise OptionError(f"{self.form}: {name}={text!r:.40} is not a number from 1 on")
        return int(text)


def read_arguments(form: str, text: str, usage: str) -> Arguments:
    """`text` by `usage`, such as `JSON,IMAGES[,SPLIT][,frames=N]`: what stands in brackets may be missing, what has an
    equals sign is an option. A part whose name before `=` is no option is a place: paths may hold that sign.

    Raises OptionError for a missing place, one too many, and an option that is given twice.
    """
    needed = usage.partition("[")[0].split(",")
    allowed = re.findall(r"\[,([^\]]+)\]", usage)
    names = {part.partition("=")[0] for part in allowed if "=" in part}
    most = len(needed) + sum("=" not in part for part in allowed)
    places: list[str] = []
    options: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals and name in names:
            if name in options:
                raise OptionError(f"{form}:{text}: {name} is given twice")
            options[name] = value
        else:
            places.append(part)
    if not len(needed) <= len(places) <= most or not all(places[: len(needed)]):
        raise OptionError(f"{form}:{text}: give {form}:{usage}")
    return Arguments(form, tuple(places), options)
