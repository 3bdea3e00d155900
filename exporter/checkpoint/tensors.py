"""Tensors of a checkpoint by name, read lazily from safetensors shards (or `.bin` files, without running pickle code)."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...runtime.errors import ExportError

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


class TensorFiles:
    """All tensors of a folder. Names, shapes and dtypes are read at once; one file is mapped at a time, so memory
    stays near the largest shard.

    Raises ExportError when there are no weights, a shard is missing, or a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _weight_files(folder)
        self._entries: dict[str, _Entry] = {}
        self._current: tuple[int, Any] | None = None
        for number in range(len(self._files)):
            handle = self._handle(number)
            for position, name in enumerate(handle.keys()):
                self._entries[name] = _entry(handle, name, number, position)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    @property
    def shards(self) -> list[Path]:
        """The files that hold the tensors."""
        return list(self._files)

    def order(self, name: str) -> tuple[int, int]:
        """(file, position): reading in this order goes through every shard once."""
        entry = self._find(name)
        return entry.file, entry.position

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        """Stored dtype name, as in torch (`float16`, ...)."""
        return self._find(name).dtype

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype."""
        handle = self._handle(self._find(name).file)
        return handle[name] if isinstance(handle, dict) else handle.get_tensor(name)

    def _find(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ExportError(f"the checkpoint {self.folder} has no tensor {name!r}")
        return self._entries[name]

    def _handle(self, number: int) -> Any:
        if self._current is None or self._current[0] != number:
            self._current = None  # unmaps the file before the next one is mapped
            self._current = number, _open(self._files[number])
        return self._current[1]


@dataclass(frozen=True)
class _Entry:
    file: int
    position: int
    shape: tuple[int, ...]
    dtype: str


def _entry(handle: Any, name: str, file: int, position: int) -> _Entry:
    if isinstance(handle, dict):
        return _Entry(
            file, position, tuple(handle[name].shape), str(handle[name].dtype).removeprefix("torch.")
        )
    part = handle.get_slice(name)
    dtype = str(part.get_dtype())
    return _Entry(file, position, tuple(part.get_shape()), _DTYPES.get(dtype, dtype.lower()))


def _weight_files(folder: Path) -> list[Path]:
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = folder / f"{stem}.{suffix}.index.json"
        single = folder / f"{stem}.{suffix}"
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as error:
                raise ExportError(f"{index} is not an index of weights: {error}") from error
            for name in names:
                if Path(name).name != name:
                    raise ExportError(f"{index} names {name!r}, which is not a file of its folder")
                if not (folder / name).is_file():
                    raise ExportError(f"the checkpoint misses the shard {folder / name}; download it again")
            return [folder / n for n in names]
        if single.is_file():
            return [single]
    raise ExportError(f"{folder} holds no weights (model.safetensors, its index, or pytorch_model.bin)")


def _open(path: Path) -> Any:
    if path.suffix == ".safetensors":
        try:
            return safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ExportError(f"{path} cannot be read ({error}); download it again") from error
    try:
        tensors = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, ValueError, OSError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ExportError(
            f"{path} cannot be loaded as plain tensors ({reason}); save the model as safetensors"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise ExportError(f"{path} is not a table of tensors; save the model as safetensors")
    return tensors
