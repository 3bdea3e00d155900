"""A folder in which hidden states of a frozen target are kept: its name, what it says of itself, and one process at a time that makes it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...runtime.common.atomic_files import atomic_write
from ...runtime.common.errors import OptionError
from ...runtime.common.locks import alone
from ..data.reading.records import RecordSet
from ..targets.target import Target

CACHE_DTYPES = ("float16", "float32")
PROGRESS = "progress.json"
"""A file of a cache that is being made: which files, and how many records of them are there."""


def cache_place(folder: Path, target: Target, records: RecordSet, dtype: str, what: str = "") -> Path:
    """The subfolder of a cache: of this target, these records and dtype, and of `what` is kept of them."""
    named = f"{what}{target.fingerprint}|{records.identity()}|{dtype}"
    return folder / hashlib.sha256(named.encode()).hexdigest()[:16]


@contextmanager
def to_make(place: Path, names: Sequence[str]) -> Iterator[list[str]]:
    """Those of the files ``NAME.bin`` that are missing, none of which another process makes before the block ends: where one
    does already, it is waited for. Where nothing is missing nobody waits, and nothing is written."""

    def missing() -> list[str]:
        return [name for name in names if not (place / f"{name}.bin").exists()]

    if not missing():
        _forget_finished(place)
        yield []
        return
    place.mkdir(parents=True, exist_ok=True)
    with alone(place / "lock"):
        yield missing()


def read_progress(place: Path, names: Sequence[str]) -> dict[str, Any]:
    """What `save_progress` wrote last of the files `names`, perhaps with others; {} where that was of other files: they are
    made anew then, so that what it says does not hold any more, and it is removed."""
    path = place / PROGRESS
    progress = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if set(names) <= set(progress.get("files", ())) and all((place / f"{n}.partial").exists() for n in names):
        return progress
    path.unlink(missing_ok=True)
    return {}


def save_progress(place: Path, names: Sequence[str], records: int, **further: Any) -> None:
    """From here a later process goes on with the files ``NAME.partial``, which are on the disk so far."""
    with atomic_write(place / PROGRESS) as out:
        out.write(json.dumps({"files": list(names), "records": records, **further}).encode())


def forget_progress(place: Path) -> None:
    """All is there: removes what says how far it was, and files that were begun beside those that are there now."""
    for left in (*place.glob("progress*.json"), *place.glob("*.partial")):
        left.unlink(missing_ok=True)


def _forget_finished(place: Path) -> None:
    """Removes what a process left that was killed at its very end: nobody else would. Others may be making other files."""
    with suppress(OSError, ValueError):  # a folder that cannot be written
        files = json.loads((place / PROGRESS).read_text("utf-8"))["files"]
        if all((place / f"{name}.bin").exists() for name in files):
            (place / PROGRESS).unlink()


def write_meta(place: Path, target: Target, records: RecordSet, dtype: str, **further: int) -> None:
    """What a cache is of, for people and for those who read it."""
    known = {"target": target.name, "fingerprint": target.fingerprint, "data": records.name, "dtype": dtype}
    with atomic_write(place / "cache.json") as out:
        out.write(json.dumps({**known, "hidden_size": target.hidden_size, **further}).encode() + b"\n")


def check_cache_dtype(dtype: str) -> None:
    """OptionError unless hidden states are kept in it."""
    if dtype not in CACHE_DTYPES:
        raise OptionError(f"--cache-dtype {dtype!r}: choose one of {', '.join(CACHE_DTYPES)}")


def stored(values: Tensor, dtype: str, target: str) -> np.ndarray:
    """`values` in the dtype of a cache. OptionError where one does not fit."""
    peak = values.abs().max().item() if len(values) else 0.0
    if not math.isfinite(peak) or peak > float(np.finfo(dtype).max):
        raise OptionError(f"a row of {target} reaches {peak:.3g}, beyond {dtype}; use --cache-dtype float32")
    return values.cpu().numpy().astype(dtype)
