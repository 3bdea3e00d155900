"""How a manifest is read: every value has a check, every part is a dataclass whose fields carry theirs.

A check takes (value, path) and returns the value, or raises `BundleError` that names the field and the value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from ..common.errors import BundleError

ITEM_SIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype name that a manifest may contain."""

FLOATS = ("float32", "float16", "bfloat16")

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@-]{0,199}")
GIB = 1 << 30

Check = Callable[[Any, str], Any]


def failure(path: str, value: Any, expected: str) -> BundleError:
    text = repr(value)
    return BundleError(
        f"manifest field {path!r}: {text if len(text) <= 120 else text[:117] + '...'} is not {expected}"
    )


# --- checks of single values: each takes (value, path) and returns the value or raises BundleError ---


def integer(low: int, high: int) -> Check:
    def check(value: Any, path: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise failure(path, value, f"an integer in {low}..{high}")
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(value: Any, path: str) -> float:
        # The comparison refuses NaN and infinity too, and integers that no float can hold.
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise failure(path, value, f"a finite number in {low}..{high}")
        return value

    return check


def string(longest: int = 300, choices: tuple[str, ...] | None = None) -> Check:
    def check(value: Any, path: str) -> str:
        if not isinstance(value, str) or len(value) > longest:
            raise failure(path, value, f"a string of at most {longest} characters")
        if choices is not None and value not in choices:
            raise failure(path, value, "one of " + ", ".join(choices))
        return value

    return check


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise failure(path, value, "true or false")
    return value


def file_name(value: Any, path: str) -> str:
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
        raise failure(path, value, "a plain file name (no folders, no leading dot)")
    return value


def bundle_path(value: Any, path: str) -> str:
    """A plain file name, or a path below `plans/`; never one that leaves the bundle."""
    parts = value.split("/") if isinstance(value, str) else []
    if not all(_FILE_NAME.fullmatch(part) for part in parts) or not 1 <= len(parts) <= 4:
        raise failure(path, value, "a path inside the bundle")
    if len(parts) > 1 and parts[0] != "plans":
        raise failure(path, value, "a file in the bundle's folder or below plans/")
    return value


def optional(check: Check) -> Check:
    return lambda value, path: None if value is None else check(value, path)


def list_of(item: Check, longest: int, exactly: int | None = None) -> Check:
    def check(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list | tuple) or len(value) > longest:
            raise failure(path, value, f"a list of at most {longest} entries")
        if exactly is not None and len(value) != exactly:
            raise failure(path, value, f"a list of {exactly} entries")
        return [item(entry, f"{path}[{index}]") for index, entry in enumerate(value)]

    return check


def mapping_of(item: Check, key: Check, longest: int = 10_000) -> Check:
    def check(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping) or len(value) > longest:
            raise failure(path, value, f"an object of at most {longest} entries")
        return {key(name, path): item(entry, f"{path}.{name}") for name, entry in value.items()}

    return check


def json_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise failure(path, value, "an object")
    return dict(value)


def dimension(value: Any, path: str) -> int | str:
    if isinstance(value, str):
        return string(40)(value, path)
    return integer(0, 1 << 31)(value, path)


def checked(check: Check, **default: Any) -> Any:
    return field(metadata={"check": check}, **default)


class Part:
    """Mixin of the manifest's dataclasses: checked construction from JSON objects and back."""

    extra: dict[str, Any]

    @classmethod
    def parse(cls, value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            raise failure(path, value, "an object")
        known = {part.name: part for part in dataclasses.fields(cls) if "check" in part.metadata}  # type: ignore[arg-type]
        fields: dict[str, Any] = {}
        for name, part in known.items():
            where = f"{path}.{name}" if path else name
            if name in value:
                fields[name] = part.metadata["check"](value[name], where)
            elif part.default is dataclasses.MISSING and part.default_factory is dataclasses.MISSING:
                raise BundleError(f"manifest field {where!r} is missing; build the bundle again")
        extra = {name: entry for name, entry in value.items() if name not in known}
        return cls(**fields, extra=extra)  # type: ignore[call-arg]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object this part was read from, unknown fields included."""
        out: dict[str, Any] = {}
        for part in dataclasses.fields(self):  # type: ignore[arg-type]
            if "check" in part.metadata:
                out[part.name] = _plain(getattr(self, part.name))
        return out | self.extra


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
