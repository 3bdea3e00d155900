"""Tensors of a checkpoint by name, read lazily from safetensors shards (or `.bin` files, without running pickle code).

What is read is the caller's own memory: no shard stays mapped, so memory is what is held and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..common.memory import CheckpointMemory, widened_bytes
from ..quantization.matrix import QuantizedMatrix
from .pickled import load_pickled
from .plain import plain_problem

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
WEIGHT_FILES = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In transformers' order: a folder's weights are in the first of these that it has."""

REMAP_BYTES = 256 << 20
"""A `.bin` file, which torch maps, is mapped anew after this many bytes were read: pages that were touched count as
memory of the process as long as they are mapped."""


class TensorFiles:
    """All tensors of a folder. Names, shapes and dtypes are read at once, tensors when they are asked for.

    Raises ExportError when there are no weights, a shard is missing, or a file cannot be read.
    """

    readable = True
    """Whether the tensors are on this machine, and not only described."""
    unread: tuple[str, ...] = ()
    """Names of further files of weights of the same format: another save, which transformers does not read either."""
    quantized: Mapping[str, QuantizedMatrix] = MappingProxyType({})
    """The matrices that are there as integers, too (`quantization/matrix.py`)."""
    notices: tuple[str, ...] = ()
    """Lines for the user about how the numbers are stored."""

    def __init__(self, folder: Path, named: str | None = None) -> None:
        """`named`: the file or index that the configuration names (`transformers_weights`)."""
        files, self.unread = _weight_files(folder, named)
        self._set_up(folder, files, [_safetensors_spans(f) if _is_safe(f) else {} for f in files])
        for number, file in enumerate(files):
            if not _is_safe(file):
                self._entries |= _bin_entries(self._tensors(number), number)

    def _set_up(self, folder: Path, files: list[Path], spans: list[dict[str, TensorSpan]]) -> None:
        self.folder, self._files = folder, files
        self._current: tuple[int, Any] | None = None
        self._touched = 0
        self._entries: dict[str, _Entry] = {}
        for number, file_spans in enumerate(spans):
            for position, (name, span) in enumerate(file_spans.items()):
                dtype = _DTYPES.get(span.dtype, span.dtype.lower())
                self._entries[name] = _Entry(number, position, span.shape, dtype, span.offset)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    @property
    def shards(self) -> list[Path]:
        """The files that hold the tensors."""
        return list(self._files)

    @property
    def memory(self) -> CheckpointMemory:
        """What holding the tensors takes."""
        floats = [e for e in self._entries.values() if "float" in e.dtype]
        sizes = [(e.shape, math.prod(e.shape) * _item_size(e.dtype)) for e in floats]
        return CheckpointMemory(
            sum(stored for _, stored in sizes),
            4 * sum(math.prod(shape) for shape, _ in sizes),
            max((stored for _, stored in sizes), default=0),
            max((widened_bytes(shape, stored) for shape, stored in sizes), default=0),
        )

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

    def place(self, name: str) -> Place | None:
        """Where the bytes of a tensor lie; None in a file that is not safetensors."""
        entry = self._find(name)
        return None if entry.offset is None else Place(self._files[entry.file], entry.offset, entry.dtype)

    def file_bytes(self, file: Path) -> int:
        """Size of a safetensors file, which ends with its last tensor."""
        ends = (
            e.offset + math.prod(e.shape) * _item_size(e.dtype)
            for e in self._entries.values()
            if e.offset is not None and self._files[e.file] == file
        )
        return max(ends, default=0)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, in memory of its own."""
        entry = self._find(name)
        if not self.readable:
            raise ExportError(f"the tensor {name} is on the hub, not in {self.folder}; download the model")
        if entry.offset is not None:
            return _read_range(self._files[entry.file], entry)
        tensor = self._tensors(entry.file)[name].clone()
        self._touched += tensor.nbytes
        if self._touched > REMAP_BYTES:
            self._current = None
        return tensor

    def _find(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ExportError(f"the checkpoint {self.folder} has no tensor {name!r}")
        return self._entries[name]

    def _tensors(self, number: int) -> dict[str, torch.Tensor]:
        """The mapped tensors of a `.bin` file; one file is mapped at a time."""
        if self._current is None or self._current[0] != number:
            self._current = None  # unmaps the file before the next one is mapped
            self._current, self._touched = (number, _open_bin(self._files[number])), 0
        return self._current[1]


def _item_size(dtype: str) -> int:
    torch_dtype = getattr(torch, dtype, None)
    return 4 if torch_dtype is None else torch_dtype.itemsize


@dataclass(frozen=True)
class Place:
    """Where a tensor's numbers stand one after the other: from byte `offset` of `file`, of type `dtype` (torch's name)."""

    file: Path
    offset: int
    dtype: str


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is: its file's number, its place in the order of names, and in safetensors its byte offset."""

    file: int
    position: int
    shape: tuple[int, ...]
    dtype: str
    offset: int | None = None


@dataclass(frozen=True)
class TensorSpan:
    """A tensor of a safetensors file as its header describes it, `dtype` in its words; `offset` is that of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def _is_safe(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _safetensors_spans(path: Path) -> dict[str, TensorSpan]:
    """From the header, after the library has checked it (it knows which headers lie)."""
    try:
        with safe_open(str(path), framework="pt") as handle:
            names = list(handle.keys())
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise_if_foreign(error)
        raise ExportError(f"{path} cannot be read ({error}); download it again") from error
    return {
        name: TensorSpan(
            str(header[name]["dtype"]),
            tuple(header[name]["shape"]),
            8 + size + header[name]["data_offsets"][0],
        )
        for name in names
    }


def _read_range(path: Path, entry: _Entry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype, None)
    if dtype is None:
        raise ExportError(
            f"{path} holds tensors of type {entry.dtype}, which torch {torch.__version__} has not"
        )
    tensor = torch.empty(entry.shape, dtype=dtype)
    if tensor.numel() == 0:
        return tensor
    left = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(entry.offset or 0)
            while left:
                count = file.readinto(left)  # at most 2 GiB at a time on Linux
                if not count:
                    raise ExportError(f"{path} is cut off; download it again")
                left = left[count:]
    except OSError as error:
        raise_if_foreign(error)
        raise ExportError(f"{path} cannot be read ({error.strerror}); download it again") from error
    return tensor


def _bin_entries(tensors: dict[str, torch.Tensor], number: int) -> dict[str, _Entry]:
    return {
        name: _Entry(number, position, tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for position, (name, t) in enumerate(tensors.items())
    }


def _weight_files(folder: Path, named: str | None) -> tuple[list[Path], tuple[str, ...]]:
    """(files that hold the weights, names of what could hold them and is not read)."""
    names = [name for name in WEIGHT_FILES if (folder / name).is_file()]
    if named is not None:
        if Path(named).name != named or not named.endswith((".safetensors", ".safetensors.index.json")):
            raise ExportError(
                f"{folder / 'config.json'}: transformers_weights={named!r:.80} is no safetensors file or index of the folder"
            )
        if not (folder / named).is_file():
            raise ExportError(
                f"the checkpoint misses {folder / named}, which config.json names; download it again"
            )
        names = [named, *(name for name in names if name != named)]
    if not names:
        raise ExportError(f"{folder} holds no weights (model.safetensors, its index, or pytorch_model.bin)")
    first, *others = names
    if not first.endswith(".index.json"):
        return [folder / first], _twins(first, others)
    shards = index_shards(folder / first)
    for name in shards:
        if not (folder / name).is_file():
            raise ExportError(f"the checkpoint misses the shard {folder / name}; download it again")
    return [folder / name for name in shards], _twins(first, others)


def _twins(first: str, others: list[str]) -> tuple[str, ...]:
    """Of the files that are not read those in the format of `first`: an older save. Another format holds the same model."""
    return tuple(
        name
        for name in others
        if Path(name.removesuffix(".index.json")).suffix == Path(first.removesuffix(".index.json")).suffix
    )


def index_shards(index: Path) -> list[str]:
    """Names of the shards that an index of weights names, sorted. Raises ExportError where it is none."""
    try:
        document = json.loads(index.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise_if_foreign(error)
        raise ExportError(f"{index} is not an index of weights: {error}") from error
    table = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(table, dict) or not table:
        raise ExportError(
            f"{index} is not an index of weights: it has no table 'weight_map'; download it again"
        )
    for name in table.values():
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
            raise ExportError(f"{index} names {name!r:.80}, which is not a file of its folder")
    return sorted(set(table.values()))


def _open_bin(path: Path) -> dict[str, torch.Tensor]:
    tensors = load_pickled(path, mapped=True)
    for name, tensor in tensors.items():
        if problem := plain_problem(tensor):
            raise ExportError(f"{path}: {name:.80} {problem}; save the model as safetensors")
    return tensors
