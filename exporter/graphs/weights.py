"""The one file of weights: every tensor gets one offset, shared by all graphs, and is streamed once.

Offsets are known before any weight is read (they follow from shapes), so graphs are written first and the file is
filled shard by shard; the most memory ever held is one tensor. A store that links leaves the checkpoint's tensors where
they are, in its safetensors files, which become hard links in the bundle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import onnx_ir as ir
import torch

from ...runtime.bundle.float32_view import as_float32
from ...runtime.bundle.interfaces import interface
from ...runtime.bundle.manifest import FLOATS, Manifest
from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ...runtime.graphs.role import Values
from ..checkpoint.tensors import Place, TensorFiles
from ..common.write_errors import FULL
from ..quantization.blocks import packed
from ..quantization.matrix import INTEGERS, ORDER, SCALES, ZERO_POINTS, QuantizedMatrix, matrix_of
from .dtypes import ONNX, TORCH, stored_bytes
from .weight_refs import WEIGHTS_FILE, IntegerRef, Slot, WeightRef

CHUNK = 1 << 20  # numbers looked at together
PAGE, PAGE_FROM, LINE = 4096, 65536, 64  # alignment of tensors >= 64 KiB, and of smaller ones (bytes)


class TensorReader(Protocol):
    """Reads tensors of a checkpoint by name, one at a time."""

    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> torch.Tensor: ...
    def order(self, name: str) -> tuple[int, int]: ...


class WeightStore:
    """Hands out slots for weights and writes the file. One instance per bundle."""

    def __init__(
        self, readers: Sequence[TensorReader], manifest: Manifest, linked: TensorFiles | None = None
    ) -> None:
        """`manifest` describes the bundle as far as it is known; its `tensors` follow before the first graph. Tensors of
        `linked` that have the bundle's type are not stored anew."""
        self._manifest = manifest
        self._linked = linked
        self.shards: dict[str, Path] = {}
        """Files that the bundle links to, by their name in it."""
        self._readers: list[TensorReader] = []
        self._quantized: dict[str, QuantizedMatrix] = {}
        self._slots: dict[WeightRef, Slot] = {}
        self._owner: dict[str, WeightRef] = {}
        self.bytes = 0
        for reader in readers:
            self.add_reader(reader)

    def interface(
        self, role: str, layers: Sequence[int] | None = None, name: str | None = None
    ) -> tuple[Values, Values]:
        """(inputs, outputs) of the graph `name` of `role`, as it is composed: in float32."""
        return interface(as_float32(self._manifest), role, layers, name)

    def add_reader(self, reader: TensorReader) -> None:
        """Adds a further source of tensors (a draft). Matrices that its `quantized` names are stored as integers."""
        self._readers.append(reader)
        self._quantized |= getattr(reader, "quantized", {})

    def slot(self, ref: WeightRef) -> Slot:
        """The slot of `ref`, new at first request. ExportError when a tensor would be stored in two forms or differs
        in shape from what the graph expects."""
        if ref in self._slots:
            return self._slots[ref]
        shapes = [self._reader(n).shape(n) for n in ref.names]
        joined = (sum(s[0] for s in shapes), *shapes[0][1:]) if shapes[0] else ()
        stored_shape = tuple(reversed(joined)) if ref.transpose else joined
        if stored_shape != ref.shape:
            raise ExportError(
                f"tensor {' + '.join(ref.names)} has shape {stored_shape} in the checkpoint, not {ref.shape}"
            )
        size = stored_bytes(self.stored_dtype(ref), math.prod(ref.shape))
        place = self._place(ref)
        if place is not None:
            self.shards[place.file.name] = place.file
            slot = self._slots[ref] = Slot(place.offset, size, place.file.name)
            return slot
        for name in ref.names:
            other = self._owner.setdefault(name, ref)
            if other != ref:
                raise ExportError(
                    f"tensor {name} is needed in two layouts ({other} and {ref}) and would be stored twice"
                )
        align = PAGE if size >= PAGE_FROM else LINE
        start = -(-self.bytes // align) * align
        slot = self._slots[ref] = Slot(start, size)
        self.bytes = start + slot.bytes
        return slot

    def parts(self, ref: WeightRef) -> list[WeightRef] | None:
        """The tensors that `ref` is made of, as the checkpoint's own files hold them; None where one of them does not stay
        there."""
        plain = [WeightRef((name,), False, self._reader(name).shape(name), ref.dtype) for name in ref.names]
        return plain if all(self._place(part) is not None for part in plain) else None

    def product_of(self, ref: WeightRef) -> list[IntegerRef | WeightRef] | None:
        """What a product with a matrix `ref` is made of where one of its tensors is stored as integers: the whole where all
        are integers of one kind, else each tensor for itself, side by side. None for one that is stored in floats."""
        kinds = [self._quantized.get(name) for name in ref.names]
        first = kinds[0]
        if not any(kinds):
            return None
        if first is not None and not first.order and kinds.count(first) == len(kinds):
            return [self._integer_ref(ref.names, first)]
        return [
            WeightRef((name,), ref.transpose, self._stored_shape(name, ref.transpose), ref.dtype)
            if kind is None
            else self._integer_ref((name,), kind)
            for name, kind in zip(ref.names, kinds, strict=True)
        ]

    def integers_of(self, ref: WeightRef) -> IntegerRef | None:
        """The integers that stand for a matrix of one tensor; None for one that is stored in floats."""
        kind = self._quantized.get(ref.names[0]) if len(ref.names) == 1 else None
        return None if kind is None else self._integer_ref(ref.names, kind)

    def in_first(self, ref: WeightRef) -> bool:
        """Whether a matrix of integers is [in, out] as `ref` has it."""
        return ref.transpose != any(
            kind.transposed for name in ref.names if (kind := self._quantized.get(name)) is not None
        )

    def _integer_ref(self, names: tuple[str, ...], kind: QuantizedMatrix) -> IntegerRef:
        shapes = [self._reader(name).shape(name + INTEGERS) for name in names]
        out_features, in_features = sum(shape[0] for shape in shapes), shapes[0][1]

        def part(suffix: str, size: int, dtype: str) -> WeightRef:
            return WeightRef(tuple(name + suffix for name in names), True, (size, out_features), dtype)

        blocks = in_features // kind.block
        return IntegerRef(
            part(INTEGERS, in_features, kind.dtype),
            part(SCALES, blocks, "float32"),
            part(ZERO_POINTS, blocks, kind.dtype) if kind.zero_points else None,
            WeightRef((names[0] + ORDER,), False, (in_features,), "int32") if kind.order else None,
            kind.block,
        )

    def _stored_shape(self, name: str, transpose: bool) -> tuple[int, ...]:
        shape = self._reader(name).shape(name)
        return tuple(reversed(shape)) if transpose else shape

    def _place(self, ref: WeightRef) -> Place | None:
        """Where `ref` stays: it is one tensor of the checkpoint, of the bundle's type, at an address of that type."""
        if self._linked is None or len(ref.names) != 1 or ref.transpose or ref.names[0] not in self._linked:
            return None
        place, dtype = self._linked.place(ref.names[0]), self.stored_dtype(ref)
        fits = place is not None and place.dtype == dtype and place.offset % TORCH[dtype].itemsize == 0
        return place if fits else None

    def stored_dtype(self, ref: WeightRef) -> str:
        """The type of `ref` in the file."""
        return self._manifest.weights_dtype if ref.dtype == "float32" else ref.dtype

    def external(self, name: str, ref: WeightRef) -> ir.ExternalTensor:
        """An initializer's value that points at the slot of `ref`, in the type that the graph is composed with
        (`precision.variants` says how a graph reads what is stored)."""
        slot = self.slot(ref)
        dtype = ONNX[ref.dtype]
        return ir.ExternalTensor(
            slot.file, slot.offset, slot.bytes, dtype, shape=ir.Shape(ref.shape), name=name
        )

    @property
    def parameters(self) -> int:
        """Numbers of the networks that are stored; scales, zero points and orders of integers are none."""
        return sum(math.prod(ref.shape) for ref in self._slots if is_number(ref.names[0]))

    @property
    def loaded_bytes(self) -> int:
        """Bytes that a CPU holds of it: floats become float32."""
        return sum(
            4 * math.prod(ref.shape) if ref.dtype == "float32" else slot.bytes
            for ref, slot in self._slots.items()
        )

    def slots(self) -> dict[WeightRef, Slot]:
        """All slots handed out so far."""
        return dict(self._slots)

    def write(self, folder: Path, progress: Callable[[int, int], None] | None = None) -> Path:
        """Writes the file, and looks at every number of linked ones. `progress(done, total)` counts bytes. ExportError
        when the disk is full."""
        path = folder / WEIGHTS_FILE
        done, total = 0, sum(slot.bytes for slot in self._slots.values())
        refs = sorted(self._slots, key=lambda r: self._reader(r.names[0]).order(r.names[0]))
        try:
            with path.open("wb") as file:
                file.truncate(self.bytes)
                for ref in refs:
                    slot = self._slots[ref]
                    tensor = self.materialize(ref)
                    if slot.file == WEIGHTS_FILE and tensor.numel():
                        file.seek(slot.offset)
                        flat = packed(tensor) if ref.dtype == "int4" else tensor.reshape(-1).view(torch.uint8)
                        file.write(flat.numpy().data)
                    del tensor
                    done += slot.bytes
                    if progress:
                        progress(done, total)
                file.flush()
        except OSError as error:
            raise_if_foreign(error)
            if error.errno in FULL:
                raise ExportError(
                    f"no space left for {path.name}: {self.bytes / 1e6:.1f} MB are needed in {folder}"
                ) from error
            raise
        return path

    def materialize(self, ref: WeightRef) -> torch.Tensor:
        """The stored form of `ref` (int4 a byte each), read from its source now; beside it, one of its parts is held at a time.

        Raises ExportError naming a tensor with a number that is not finite, or that the stored type cannot hold.
        """
        dtype = self.stored_dtype(ref)
        tensor = torch.empty(ref.shape, dtype=TORCH[dtype])
        joined = tensor.t() if ref.transpose else tensor  # a view: parts are joined along its first dimension
        start = 0
        for name in ref.names:
            part = self._reader(name).read(name)
            target = joined if joined.dim() == 0 else joined[start : start + part.shape[0]]
            target.copy_(part)  # converts without a copy in between
            start += 0 if joined.dim() == 0 else part.shape[0]
            del part
        if dtype in FLOATS and not _finite(tensor):
            for name in ref.names:
                _check_finite(name, self._reader(name).read(name), dtype)
        return tensor

    def _reader(self, name: str) -> TensorReader:
        for reader in self._readers:
            if name in reader:  # type: ignore[operator]
                return reader
        raise ExportError(f"the checkpoint has no tensor {name!r}")


def is_number(name: str) -> bool:
    """Whether the tensor `name` holds numbers of a network: scales, zero points and orders of integers are none."""
    return matrix_of(name) == name or name.endswith(INTEGERS)


def _finite(tensor: torch.Tensor) -> bool:
    """Whether every number of a contiguous tensor is finite; a sum is not if one of its numbers is not."""
    flat = tensor.reshape(-1)
    # In parts: a sum in float64 takes a copy of what it adds up.
    sums = (flat[at : at + CHUNK].sum(dtype=torch.float64) for at in range(0, flat.numel(), CHUNK))
    return all(bool(torch.isfinite(value)) for value in sums)


def _check_finite(name: str, source: torch.Tensor, dtype: str) -> None:
    """Raises ExportError when `source`, as read, holds what cannot be stored as `dtype`."""
    bad = int((~torch.isfinite(source)).sum())
    if bad:
        raise ExportError(
            f"tensor {name} holds {bad} number(s) that are NaN or infinite; the checkpoint is damaged, get it again"
        )
    if not bool(torch.isfinite(source.to(TORCH[dtype])).all()):
        peak = float(source.abs().max())
        raise ExportError(
            f"tensor {name} reaches {peak:.4g}, beyond {dtype}; use --precision bfloat16 or float32"
        )
