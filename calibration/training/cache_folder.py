"""A folder in which rows of a frozen target are kept: its name, what it says of itself, and one process at a time that makes it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch import Tensor

from ...runtime.errors import OptionError
from ...runtime.files import replacing
from ...runtime.locks import alone
from ..data.records import RecordSet
from ..targets.target import Target

CACHE_DTYPES = ("float16", "float32")


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
        yield []
        return
    place.mkdir(parents=True, exist_ok=True)
    with alone(place / "lock"):
        yield missing()


def write_meta(place: Path, target: Target, records: RecordSet, dtype: str, **further: int) -> None:
    """What a cache is of, for people and for those who read it."""
    known = {"target": target.name, "fingerprint": target.fingerprint, "data": records.name, "dtype": dtype}
    with replacing(place / "cache.json") as out:
        out.write(json.dumps({**known, "hidden_size": target.hidden_size, **further}).encode() + b"\n")


def check_cache_dtype(dtype: str) -> None:
    """OptionError unless rows are kept in it."""
    if dtype not in CACHE_DTYPES:
        raise OptionError(f"--cache-dtype {dtype!r}: choose one of {', '.join(CACHE_DTYPES)}")


def stored(rows: Tensor, dtype: str, target: str) -> np.ndarray:
    """`rows` in the dtype of a cache. OptionError where one does not fit."""
    peak = rows.abs().max().item() if len(rows) else 0.0
    if not math.isfinite(peak) or peak > float(np.finfo(dtype).max):
        raise OptionError(f"a row of {target} reaches {peak:.3g}, beyond {dtype}; use --cache-dtype float32")
    return rows.cpu().numpy().astype(dtype)
