"""A model whose weights were trained further: a folder like that of the model it came from, with other weights.

Configuration, tokenizer and processor are copied, but not `recipe.json`, which tells how the original's weights were made,
nor what a configuration says of integers: a model whose weights were trained has floats.
Tensors keep their names, and `trained_from.json` says which model it was (`origin.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from ...runtime.common.atomic_files import atomic_write
from ...runtime.common.errors import ExportError
from .checkpoint import Checkpoint
from .hub import SMALL
from .layouts.table import KEYS
from .origin import Origin
from .tensors import INDEX, SINGLE

RECIPE = "recipe.json"
"""How a bundled model's weights were made and what they reach."""

SHARD_BYTES = 2 << 30
"""Of weights in one file, and in memory beside the model while they are written."""


class ChangedTensors:
    """A checkpoint's tensors with some replaced, as `fingerprint` reads them. What is replaced has the type it was
    trained in, float32."""

    def __init__(self, checkpoint: Checkpoint, changed: Mapping[str, torch.Tensor]) -> None:
        self._files = checkpoint.tensors
        self._changed = changed
        for name, value in changed.items():
            if tuple(value.shape) != self._files.shape(name):
                raise ExportError(
                    f"{name} is trained with shape {list(value.shape)}, but stored with {list(self._files.shape(name))} in "
                    f"{self._files.folder}; save the model with this version of transformers"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._files.shape(name)

    def dtype(self, name: str) -> str:
        """Its dtype's name, as in torch."""
        changed = self._changed.get(name)
        return self._files.dtype(name) if changed is None else str(changed.dtype).removeprefix("torch.")

    def read(self, name: str) -> torch.Tensor:
        """The tensor in that dtype, in memory of its own."""
        changed = self._changed.get(name)
        return self._files.read(name) if changed is None else changed.detach().to("cpu", copy=True)

    def bytes(self, name: str) -> int:
        """What it takes in that dtype."""
        dtype = getattr(torch, self.dtype(name))
        return torch.Size(self.shape(name)).numel() * dtype.itemsize


def write_changed(folder: Path, checkpoint: Checkpoint, tensors: ChangedTensors, origin: Origin) -> None:
    """Writes the folder; each file is replaced atomically. A kill may leave some weights of before: whoever needs to
    know compares the fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    copy_small(folder, checkpoint)
    origin.write(folder)
    write_tensors(folder, tensors)


def copy_small(folder: Path, checkpoint: Checkpoint, without: Collection[str] = ()) -> None:
    """Copies configuration, tokenizer and processor into `folder`, which is there, but for the files named in `without`."""
    for path in sorted(p for pattern in SMALL for p in checkpoint.folder.glob(pattern)):
        if path.name in (RECIPE, *without) or path.name.endswith(".index.json"):
            continue
        if path.name == "config.json" and checkpoint.layout is not None:
            _write_plain_config(path, folder)
        else:
            with path.open("rb") as source, atomic_write(folder / path.name) as out:
                shutil.copyfileobj(source, out)


class WrittenTensors(Protocol):
    """What is written: names in their order, and of each its bytes and its numbers."""

    def __iter__(self) -> Iterator[str]: ...

    def read(self, name: str) -> torch.Tensor: ...

    def bytes(self, name: str) -> int: ...


def write_tensors(folder: Path, tensors: WrittenTensors) -> None:
    """Writes safetensors files, with an index where there are several; each file is replaced atomically."""
    from safetensors.torch import save

    shards = _shards(tensors)
    table: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        table |= dict.fromkeys(names, file)
        with atomic_write(folder / file) as out:
            out.write(save({name: tensors.read(name).contiguous() for name in names}, {"format": "pt"}))
    if len(shards) > 1:
        total = sum(map(tensors.bytes, table))
        with atomic_write(folder / INDEX) as out:
            out.write(json.dumps({"metadata": {"total_size": total}, "weight_map": table}, indent=1).encode())


def _write_plain_config(path: Path, folder: Path) -> None:
    """config.json of a quantized checkpoint, without what it says of integers: the copy's matrices are floats."""
    document = json.loads(path.read_text("utf-8"))
    for part in (document, *(value for value in document.values() if isinstance(value, dict))):
        for key in KEYS:
            part.pop(key, None)
    with atomic_write(folder / path.name) as out:
        out.write((json.dumps(document, indent=2) + "\n").encode())


def _shards(tensors: WrittenTensors) -> list[list[str]]:
    """Names by file: at most `SHARD_BYTES` each, or one tensor."""
    shards: list[list[str]] = [[]]
    used = 0
    for name in tensors:
        size = tensors.bytes(name)
        if shards[-1] and used + size > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards
