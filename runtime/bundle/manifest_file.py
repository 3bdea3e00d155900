"""Read the file `manifest.json` of a bundle, strictly."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from ..common.errors import BundleError
from ..common.foreign_errors import raise_if_foreign

MANIFEST = "manifest.json"
MANIFEST_LIMIT = 64 << 20
"""Bytes. A manifest of a 96-layer model with plans is below 4 MB; anything near this is not one."""

REBUILD = "build it again with `vlmexport build`, or copy the whole folder again"
COPY_IN = (
    "copy the files in instead of linking them (`cp -rL`; of a bundle on the Hugging Face Hub: `hf download REPO --local-dir "
    "FOLDER`)"
)


def read_manifest(path: Path) -> Any:
    """Parse `manifest.json` strictly: UTF-8, at most 64 MiB, no duplicate names, no NaN or infinity."""
    try:
        if path.is_symlink():
            raise BundleError(f"{path}: is a link; {COPY_IN}")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would never end
            raise BundleError(f"{path}: is not a regular file; {REBUILD}")
        size = status.st_size
        if size > MANIFEST_LIMIT:
            raise BundleError(f"{path}: {size} bytes; a manifest has at most {MANIFEST_LIMIT}; {REBUILD}")
        text = path.read_bytes().decode("utf-8")
        document = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
        )
        if "\\u" in text:
            check_texts(document)
        return document
    except FileNotFoundError:
        raise BundleError(
            f"{path.parent}: holds no {MANIFEST}, so it is not a bundle; {bundle_instead(path.parent)}"
        ) from None
    except (UnicodeDecodeError, ValueError, RecursionError, OSError) as error:
        raise_if_foreign(error)
        raise BundleError(f"{path}: not a readable manifest ({error}); {REBUILD}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(name for name, _ in pairs if sum(other == name for other, _ in pairs) > 1)
        raise ValueError(f"{twice!r} appears twice")
    return values


def check_texts(document: Any) -> None:
    """Raise `ValueError` that names the field of a text which no file can hold: half of a surrogate pair, which JSON may
    write as an escape."""
    waiting: list[tuple[str, Any]] = [("", document)]
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{where} (a name)", name) for name in value]
            waiting += [(f"{where}.{name}" if where else str(name), each) for name, each in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(f"{where}[{at}]", each) for at, each in enumerate(value)]
        elif isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"field {where!a:.200}: {value!a:.120} is not Unicode text") from None


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.30} is too large a number")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _integer(digits: str) -> int:
    if len(digits) > 30:
        raise ValueError(f"{digits[:30]}… is not a sensible number")
    return int(digits)


def bundle_instead(folder: Path) -> str:
    """What to give in place of a folder that is no bundle: one in it, where there is one."""
    try:
        inside = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    except OSError as error:
        raise_if_foreign(error)
        inside = []
    return f"give {inside[0]}" if inside else "give the folder that `vlmexport build -o` wrote"
