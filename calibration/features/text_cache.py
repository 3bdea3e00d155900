"""Whole texts of a frozen target, run once and kept in flat files: for drafts that look back at what they read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from ..data.reading.records import RecordSet
from ..targets.target import Target
from ..targets.teacher_forcing import Texts
from ..targets.text_positions import AXES, has_axes
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

SAVED_EVERY = 8
"""Passes of the target between two points from which a killed build goes on."""


@dataclass(frozen=True)
class Kept:
    """One file of a table: int32 or the cache's dtype, `width` numbers each."""

    name: str
    dtype: str
    width: int

    @property
    def size(self) -> int:
        """Bytes of a row."""
        return self.width * np.dtype(self.dtype).itemsize

    def read(self, folder: Path) -> np.ndarray:
        """All rows [N, width], memory-mapped."""
        path = folder / f"{self.name}.bin"
        count = path.stat().st_size // self.size
        if not count:  # nothing can be mapped
            return np.empty((0, self.width), self.dtype)
        return np.memmap(path, self.dtype, "r", shape=(count, self.width))


class CachedTexts:
    """Texts read from the files of a `build_text_cache` folder; embeddings are the target's own table's."""

    def __init__(self, folder: Path, target: Target, taps: Sequence[int] = ()) -> None:
        meta = json.loads((folder / "cache.json").read_text("utf-8"))
        placed = has_axes(target.family)
        files = {kept.name: kept for kept in _files(meta["hidden_size"], meta["dtype"], taps, placed)}
        arrays = {name: kept.read(folder) for name, kept in files.items()}
        self.target, self.taps = target, tuple(sorted(set(taps)))
        self.records, self.tokens, self.pictures = (
            np.asarray(arrays[name]) for name in ("records", "tokens", "pictures")
        )
        self.rows_of = {0: arrays["hidden"]} | {tap: arrays[f"tap.{tap}"] for tap in self.taps}
        self.picture_rows = arrays["picture_rows"]
        self.positions = arrays["positions"] if placed else None
        self._ends = np.cumsum(self.records[:, 0])
        self._picture_ends = np.cumsum(self.pictures[:, 2])

    def __len__(self) -> int:
        return len(self.records)

    def rows(self, indices: Sequence[int]) -> Texts:
        """The texts of these records, each as long as the longest of them."""
        spans = [(int(self._ends[i] - self.records[i, 0]), int(self._ends[i])) for i in indices]
        shape = (len(spans), max(end - first for first, end in spans))
        hidden_states = {
            layer: np.zeros((*shape, self.target.hidden_size), np.float32) for layer in (0, *self.taps)
        }
        tokens, learned = np.zeros(shape, np.int64), np.zeros(shape, bool)
        positions = None if self.positions is None else np.zeros((AXES, *shape), np.int64)
        for b, (index, (first, end)) in enumerate(zip(indices, spans, strict=True)):
            for layer, into in hidden_states.items():
                into[b, : end - first] = self.rows_of[layer][first:end]
            tokens[b, : end - first] = self.tokens[first:end, 0]
            learned[b, self.records[index, 1] : end - first - 1] = True
            if positions is not None and self.positions is not None:
                positions[:, b, : end - first] = self.positions[first:end].T
        device = self.target.device
        made = {layer: torch.from_numpy(value).to(device) for layer, value in hidden_states.items()}
        ids = torch.from_numpy(tokens).to(device)
        with torch.no_grad():
            embedded = self.target.embed(ids)
        return Texts(
            made.pop(0),
            embedded,
            ids,
            torch.from_numpy(learned).to(device),
            [self._pictures(int(index)) for index in indices],
            made,
            [end - first for first, end in spans],
            None if positions is None else torch.from_numpy(positions).to(device),
        )

    def _pictures(self, index: int) -> list[tuple[int, Tensor]]:
        pictures = []
        first, last = np.searchsorted(
            self.pictures[:, 0], (index, index + 1)
        )  # they lie in the order of records
        for at in range(first, last):
            _, place, count, steps = (int(value) for value in self.pictures[at])
            end = int(self._picture_ends[at])
            embeds = np.array(self.picture_rows[end - count : end], np.float32).reshape(
                steps, count // steps, -1
            )
            pictures.append((place, torch.from_numpy(embeds).to(self.target.device)))
        return pictures


def build_text_cache(
    target: Target,
    records: RecordSet,
    taps: Sequence[int],
    folder: Path,
    dtype: str = "float16",
    batch_size: int = 16,
) -> Path:
    """Caches the texts of `records`; an interrupted build continues, a finished one is kept, one that another process makes is
    waited for, and taps can be added.

    Args:
        target: whose hidden states. records: with tokens or answers.
        taps: numbers of layers whose hidden states are kept beside the last one's.
        folder: a subfolder named by the target's fingerprint, the data and the dtype is made in it.
        dtype: `float16` or `float32`. batch_size: records per pass of the target.

    Returns:
        the subfolder, for `CachedTexts`.

    Raises:
        OptionError: a row does not fit float16. OSError: the disk is full (what was saved is gone on from).
    """
    check_cache_dtype(dtype)
    place = cache_place(folder, target, records, dtype, "texts with steps|")
    wanted = _files(target.hidden_size, dtype, taps, has_axes(target.family))
    files = {kept.name: kept for kept in wanted}
    with to_make(place, list(files)) as names, ExitStack() as stack:
        if not names:
            return place
        write_meta(place, target, records, dtype)
        partial = Partial(place, [files[name] for name in names], stack)
        for turn, at in enumerate(range(partial.records, len(records), batch_size)):
            chunk = records[at : at + batch_size]
            texts = target.texts(chunk, taps)
            for name, values in _rows_of(texts, at, dtype, target.name).items():
                partial.append(name, values)
            if turn % SAVED_EVERY == SAVED_EVERY - 1:
                partial.save(at + len(chunk))
                print(f"cached {at + len(chunk)}/{len(records)} texts", file=sys.stderr)
        partial.finish()
    return place


class Partial:
    """Files that grow together. What was saved survives a kill; what came after it is cut off and made again."""

    def __init__(self, folder: Path, files: Sequence[Kept], stack: ExitStack) -> None:
        self.folder, self.files = folder, {kept.name: kept for kept in files}
        saved = read_progress(folder, list(self.files))
        paths = {name: self._path(name) for name in self.files}
        sizes = {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}
        counts: Mapping[str, int] = saved.get("rows", {})
        whole = bool(saved) and all(
            sizes[name] >= counts[name] * kept.size for name, kept in self.files.items()
        )
        self.records: int = saved["records"] if whole else 0
        self.counts = {name: counts[name] if whole else 0 for name in self.files}
        self.open: dict[str, BinaryIO] = {}
        for name, kept in self.files.items():
            self.open[name] = stack.enter_context(paths[name].open("ab"))
            self.open[name].truncate(self.counts[name] * kept.size)

    def append(self, name: str, values: np.ndarray) -> None:
        """Rows [n, width] to a file that is being made; those of others are there already."""
        if name in self.files:
            self.open[name].write(values.astype(self.files[name].dtype).tobytes())
            self.counts[name] += len(values)

    def save(self, records: int) -> None:
        """From here a later build goes on."""
        for file in self.open.values():
            _sync(file)
        save_progress(self.folder, list(self.files), records, rows=self.counts)

    def finish(self) -> None:
        """All is there: files take their names."""
        for name, file in self.open.items():
            _sync(file)
            self._path(name).replace(self.folder / f"{name}.bin")
        forget_progress(self.folder)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.partial"


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _files(width: int, dtype: str, taps: Iterable[int], placed: bool) -> list[Kept]:
    """`records`: places of a text and the first that is learned. `pictures`: record, place of the first embedding, embeddings, time
    steps (1 but for a video). `positions`, of a `placed` text: the three axes of each place."""
    names = ("hidden", *(f"tap.{tap}" for tap in sorted(set(taps))), "picture_rows")
    sizes = {"records": 2, "tokens": 1, "pictures": 4} | ({"positions": AXES} if placed else {})
    return [
        *(Kept(name, "int32", size) for name, size in sizes.items()),
        *(Kept(name, dtype, width) for name in names),
    ]


def _rows_of(texts: Texts, first: int, dtype: str, name: str) -> dict[str, np.ndarray]:
    """What a batch of texts, whose first record has the number `first`, adds to every file."""
    lengths = texts.lengths
    inside = torch.arange(texts.hidden.shape[1]) < torch.tensor(lengths)[:, None]
    inside = inside.to(texts.hidden.device)
    starts = [
        int(row.int().argmax()) if row.any() else length
        for row, length in zip(texts.learned, lengths, strict=True)
    ]
    pictures = [
        (first + b, place, values.shape[0] * values.shape[1], len(values))
        for b, several in enumerate(texts.pictures)
        for place, values in several
    ]
    shown = [values.flatten(0, 1) for several in texts.pictures for _, values in several]
    width = texts.hidden.shape[-1]
    floats = {"hidden": texts.hidden[inside]} | {
        f"tap.{tap}": values[inside] for tap, values in texts.taps.items()
    }
    positions = {}
    if texts.positions is not None:
        positions["positions"] = texts.positions[:, inside].T.cpu().numpy()
    floats["picture_rows"] = torch.cat(shown) if shown else texts.hidden.new_zeros(0, width)
    return {
        "records": np.array(list(zip(lengths, starts, strict=True)), np.int32),
        "tokens": texts.tokens[inside].cpu().numpy()[:, None],
        "pictures": np.array(pictures, np.int32).reshape(-1, 4),
        **positions,
        **{key: stored(values, dtype, name) for key, values in floats.items()},
    }
