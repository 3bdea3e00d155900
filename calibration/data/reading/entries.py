"""Entries of documents that anyone wrote: read with their types checked, bad ones reported by file and place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ....runtime.common.errors import OptionError
from .lines import checked_text
from .records import Problems, Record

Make = Callable[[int, Any], Iterable[Record]]
"""(number from 0, entry) → its records; ValueError where it is a bad one."""


def listed(document: Any, path: Path, name: str, form: str) -> list[Any]:
    """The list `name` (with points: inside of objects) of a document. Raises OptionError where there is none."""
    entries = inside(document, name)
    if not isinstance(entries, list):
        raise OptionError(f"{path} has no list {name!r}: not the layout of {form}")
    return entries


def inside(document: Any, name: str) -> Any:
    """What stands at `name` of a document, with points inside of objects, for "" the document; None where nothing does."""
    value = document
    for part in filter(None, name.split(".")):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def collect(path: Path, name: str, entries: Iterable[Any], make: Make, problems: Problems) -> list[Record]:
    """Records of `make` over `entries`; bad ones are reported as `FILE: NAME[NUMBER]`."""
    return gather(((f"{path}: {name}[{n}]", e) for n, e in enumerate(entries)), make, problems)


def gather(entries: Iterable[tuple[str, Any]], make: Make, problems: Problems) -> list[Record]:
    """Records of `make` over (place, entry), as far as the limit asks for entries; bad ones are reported by their place."""
    records: list[Record] = []
    for number, (where, entry) in enumerate(entries):
        try:
            records += make(number, entry)
        except ValueError as error:
            problems.report(where, str(error))
        if problems.limit is not None and len(records) >= problems.limit:
            break
    return records


def fields(entry: Any) -> dict[str, Any]:
    """`entry`, which is an object; ValueError otherwise."""
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON object is expected, not {type(entry).__name__}")
    return entry


def text(entry: Any, name: str) -> str:
    """The text `name` of an object, stripped, not blank. ValueError otherwise."""
    value = fields(entry).get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {name!r} is {value!r:.80}, not a text")
    return checked_text(name, value.strip())


def identifier(entry: Any, name: str) -> int | str:
    """A field that others refer to: a whole number or a text. ValueError otherwise."""
    value = fields(entry).get(name)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError(f"field {name!r} is {value!r:.80}, neither a number nor a text")
    return value


def items(entry: Any, name: str) -> list[Any]:
    """The list `name` of an object, not empty. ValueError otherwise."""
    value = fields(entry).get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {name!r} is {value!r:.80}, not a list with something in it")
    return value


def texts(values: Iterable[Any], name: str) -> Iterator[str]:
    """Each of `values` as a text that is not blank. ValueError otherwise."""
    for value in values:
        yield text({name: value}, name)


def number_below(entry: Any, name: str, count: int) -> int:
    """The whole number `name`, 0 <= it < `count`. ValueError otherwise."""
    value = fields(entry).get(name)
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"field {name!r} is {value!r:.80}, not a number in 0..{count - 1}")
    return value
