"""Where training rows come from: the target run live, or its hidden states cached once in flat files.

The imitation network is stateless and the target frozen, so a row never changes: cached, an epoch costs
two small matrix products per row instead of a pass of the target. A target that learns is run live.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...runtime.common.atomic_files import atomic_write
from ...runtime.common.errors import OptionError
from ..data.reading.records import RecordSet
from ..targets.target import FUSED, Target
from ..targets.teacher_forcing import Rows
from .cache_folder import (
    cache_place,
    check_cache_dtype,
    forget_progress,
    read_progress,
    save_progress,
    stored,
    to_make,
    write_meta,
)

Batch = TypeVar("Batch", bound=Sized, covariant=True)


class Source(Protocol[Batch]):
    """What a draft learns from, by the index of its record."""

    def __len__(self) -> int:
        """How many records there are."""
        ...

    def rows(self, indices: Sequence[int]) -> Batch:
        """What there is of these records; its length counts what is learned from it."""
        ...


class FeatureSource(Source[Rows], Protocol):
    """Rows of records by index, float32; `Rows.records` counts within `indices`."""


def in_batches(source: Source[Batch], size: int) -> Iterator[Batch]:
    """All rows of a source, `size` records at a time; records without a row give nothing."""
    for at in range(0, len(source), size):
        batch = source.rows(range(at, min(at + size, len(source))))
        if len(batch):
            yield batch


class LiveFeatures:
    """Runs the target for every batch; with `first` also for the rows that say the first token of every answer."""

    def __init__(self, target: Target, records: RecordSet, layer: int, first: bool = False) -> None:
        self.target, self.records, self.layer, self.first = target, records, layer, first

    def __len__(self) -> int:
        return len(self.records)

    def rows(self, indices: Sequence[int]) -> Rows:
        """See `FeatureSource`."""
        return self.target.rows([self.records[i] for i in indices], [self.layer], self.first)[0]


class CachedFeatures:
    """Rows read from the files of a `build_cache` folder, memory-mapped."""

    def __init__(self, folder: Path, layer: int, device: torch.device | str = "cpu") -> None:
        meta = json.loads((folder / "cache.json").read_text("utf-8"))
        self.layer, self.device = layer, torch.device(device)
        self.offsets = np.load(folder / "offsets.npy")
        self.tokens = np.load(folder / "tokens.npy")
        shape = (int(self.offsets[-1]), meta["hidden_size"])
        self.trunk = np.memmap(folder / f"trunk.{layer}.bin", meta["dtype"], "r", shape=shape)
        last = (shape[0], meta["fused"], shape[1])
        self.residuals = np.memmap(folder / "residuals.bin", meta["dtype"], "r", shape=last)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows(self, indices: Sequence[int]) -> Rows:
        """See `FeatureSource`."""
        spans = [(int(self.offsets[i]), int(self.offsets[i + 1])) for i in indices]
        where = np.concatenate([np.arange(a, b) for a, b in spans])
        counts = [b - a for a, b in spans]
        positions = np.concatenate([np.arange(1, c + 1) for c in counts])
        return Rows(
            self._tensor(self.trunk[where]).float(),
            self._tensor(self.residuals[where]).float(),
            self._tensor(self.tokens[where]).long(),
            self._tensor(np.repeat(np.arange(len(counts)), counts)),
            self._tensor(positions),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def build_cache(
    target: Target,
    records: RecordSet,
    layers: Sequence[int],
    folder: Path,
    dtype: str = "float16",
    batch_size: int = 64,
) -> Path:
    """Caches the hidden states of `records` for draft layers `layers`; an interrupted build continues, a finished one is kept, and one
    that another process makes is waited for.

    Args:
        target: whose hidden states. records: with tokens or answers.
        layers: whose outputs to keep, each in a file of its own, so that layers can be added later.
        folder: a subfolder named by the target's fingerprint, the data and the dtype is made in it.
        dtype: `float16` or `float32`. batch_size: records per pass of the target.

    Returns:
        the subfolder, for `CachedFeatures`.

    Raises:
        OptionError: a row does not fit float16; too little disk space.
    """
    check_cache_dtype(dtype)
    place = cache_place(folder, target, records, dtype)
    with to_make(place, [*(f"trunk.{n}" for n in layers), "residuals"]) as names:
        if names:
            _build(target, records, layers, place, names, dtype, batch_size)
    return place


def _build(
    target: Target,
    records: RecordSet,
    layers: Sequence[int],
    place: Path,
    names: Sequence[str],
    dtype: str,
    batch_size: int,
) -> None:
    """Makes the files `names` of a cache."""
    answers = [target.answer(r) for r in records]
    offsets = np.cumsum([0, *(max(0, len(a) - 1) for a in answers)])
    total, fused = int(offsets[-1]), min(FUSED, target.num_layers)
    width, item = target.hidden_size, np.dtype(dtype).itemsize
    shapes: dict[str, tuple[int, ...]] = {
        name: (total, fused, width) if name == "residuals" else (total, width) for name in names
    }
    needed = item * sum(math.prod(shape) for shape in shapes.values())
    if needed > shutil.disk_usage(place).free:
        raise OptionError(
            f"the feature cache needs {needed / 1e9:.1f} GB in {place}, which has not as much space left"
        )
    if not (place / "cache.json").exists():
        tokens = np.array([t for a in answers for t in a[1:]], np.int32)
        for name, values in (("offsets", offsets), ("tokens", tokens)):
            with atomic_write(place / f"{name}.npy") as out:
                np.save(out, values)
        write_meta(place, target, records, dtype, fused=fused)
    start = read_progress(place, names).get("records", 0)
    stores = {}
    for key, shape in shapes.items():
        partial = place / f"{key}.partial"
        if not start:
            _reserve(partial, math.prod(shape) * item)
        stores[key] = np.memmap(partial, dtype, "r+", shape=shape)
    numbers = [n for n in layers if f"trunk.{n}" in names] or list(layers)
    for at in range(start, len(records), batch_size):
        chunk = records[at : at + batch_size]
        batch, trunks = target.rows(chunk, numbers)
        outputs = {f"trunk.{n}": trunk for n, trunk in trunks.items()} | {"residuals": batch.residuals}
        span = slice(int(offsets[at]), int(offsets[at + len(chunk)]))
        for key, store in stores.items():
            store[span] = stored(outputs[key], dtype, target.name)
        if (at // batch_size) % 8 == 7:
            for store in stores.values():
                store.flush()
            save_progress(place, names, at + len(chunk))
            print(f"cached {at + len(chunk)}/{len(records)} records", file=sys.stderr)
    for key, store in stores.items():
        store.flush()
        (place / f"{key}.partial").replace(place / f"{key}.bin")
    forget_progress(place)


def _reserve(path: Path, size: int) -> None:
    """A file of `size` bytes that are on the disk: writing to a mapped one that is not would kill the process where the
    disk is full."""
    with path.open("wb") as out:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(out.fileno(), 0, size)
        else:
            out.truncate(size)
