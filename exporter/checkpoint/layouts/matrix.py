"""One weight matrix of a checkpoint that stores it as integers or floats of 8 bits: its tensors, and what they mean."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ....runtime.common.errors import ExportError
from ...quantization.blocks import dequantize
from ...quantization.matrix import INTEGERS, ORDER, SCALES, ZERO_POINTS, QuantizedMatrix

Read = Callable[[str], Tensor]
"""A tensor of the disk by its name."""

WIDEST_BLOCK, LEAST_BLOCK = 128, 16
"""Inputs that share a scale. Groups of more, and channels, are cut into blocks of at most 128 with the same scale. No engine
has a kernel for blocks below 16: such a matrix is given as floats, with the same values."""

ROWS = 512
"""Outputs that are dequantized together: what that takes beside the matrix stays small."""

FLOATS = ("float16", "bfloat16", "float32")
"""What scales are stored in."""


class Headers(Protocol):
    """Names, shapes and types of a checkpoint's tensors, without their numbers."""

    def __contains__(self, name: str) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def dtype(self, name: str) -> str:
        """Its dtype's name, as in torch."""
        ...


@dataclass(frozen=True)
class StoredMatrix(ABC):
    """A matrix [out, in] below the module `path`; `parts` are its tensors on disk, of which the first is the largest."""

    path: str
    shape: tuple[int, int]
    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        """What an ordinary checkpoint calls it."""
        return f"{self.path}.weight"

    @property
    def form(self) -> QuantizedMatrix | None:
        """How its integers are given; None for one that is given as floats alone."""
        return None

    def check(self, read: Read) -> StoredMatrix:
        """Itself, as its small tensors say it is. Raises ExportError where they cannot be right."""
        return self

    @abstractmethod
    def values(self, read: Read) -> Tensor:
        """float32 [out, in]."""


@dataclass(frozen=True)
class IntegerMatrix(StoredMatrix):
    """A matrix of integers of 4 or 8 `bits`: in / `groups` inputs share a scale, and a zero point where it has any.

    `order`: groups are of inputs that do not stand side by side (`_input_groups` tells which).
    """

    bits: int
    groups: int
    zero_points: bool
    order: bool

    @abstractmethod
    def _codes(self, read: Read) -> Tensor:
        """int8 [out, in], signed, inputs in the model's order."""

    @abstractmethod
    def _group_scales(self, read: Read) -> Tensor:
        """float of any type [out, groups]."""

    @abstractmethod
    def _group_zero_points(self, read: Read) -> Tensor | None:
        """int8 [out, groups], signed; None where there are none."""

    def _input_groups(self, read: Read) -> Tensor | None:
        """Of every input the group that it belongs to, whole numbers [in]; None where they stand in a row."""
        return None

    @property
    def form(self) -> QuantizedMatrix | None:
        block = _block(self.shape[1] // self.groups)
        if block < LEAST_BLOCK:
            return None
        return QuantizedMatrix(f"int{self.bits}", block, self.zero_points, self.order)

    def check(self, read: Read) -> StoredMatrix:
        zero_points = self._group_zero_points(read)
        belongs = self._input_groups(read)
        if belongs is not None:
            self._check_groups(belongs)
        return replace(
            self,
            zero_points=zero_points is not None and bool(zero_points.any()),
            order=belongs is not None and bool((belongs.diff() < 0).any()),
        )

    def _check_groups(self, belongs: Tensor) -> None:
        size = self.shape[1] // self.groups
        if bool((belongs < 0).any()) or bool((belongs >= self.groups).any()):
            raise ExportError(
                f"{self.path}: g_idx names groups {int(belongs.min())} to {int(belongs.max())} of {self.groups}; "
                "download it again"
            )
        counts = torch.bincount(belongs.long(), minlength=self.groups)
        if bool((counts != size).any()):
            raise ExportError(
                f"{self.path}: g_idx gives a group {int(counts[counts != size][0])} inputs in place of {size}; "
                "download it again"
            )

    def integers(self, read: Read) -> Tensor:
        """int8 [out, in], columns in the order of `input_order`."""
        codes = self._codes(read)
        return codes[:, self.input_order(read).long()] if self.order else codes

    def scales(self, read: Read) -> Tensor:
        """float32 [out, in / block]."""
        return self._by_block(self._finite_scales(read))

    def block_zero_points(self, read: Read) -> Tensor:
        """int8 [out, in / block]."""
        zero_points = self._group_zero_points(read)
        assert zero_points is not None
        return self._by_block(zero_points)

    def input_order(self, read: Read) -> Tensor:
        """int32 [in]: which input a column of the integers belongs to."""
        belongs = self._input_groups(read)
        assert belongs is not None
        return torch.argsort(belongs, stable=True).to(torch.int32)

    def values(self, read: Read) -> Tensor:
        integers, scales = self.integers(read), self._finite_scales(read)
        zero_points = self._group_zero_points(read) if self.zero_points else None
        order = self.input_order(read).long() if self.order else slice(None)
        values = torch.empty(self.shape)
        for start in range(0, self.shape[0], ROWS):
            rows = slice(start, start + ROWS)
            own = None if zero_points is None else zero_points[rows]
            values[rows, order] = dequantize(integers[rows], scales[rows], own)
        return values

    def part(self, end: str, read: Read) -> Tensor:
        """The tensor that `end`, one of the ends of `quantization/matrix.py`, stands for."""
        if end == INTEGERS:
            return self.integers(read)
        if end == SCALES:
            return self.scales(read)
        return self.block_zero_points(read) if end == ZERO_POINTS else self.input_order(read)

    def part_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """End of a name → shape and type of what `part` gives."""
        form = self.form
        if form is None:
            return {}
        blocks = (self.shape[0], self.shape[1] // form.block)
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            INTEGERS: (self.shape, "int8"),
            SCALES: (blocks, "float32"),
        }
        if form.zero_points:
            shapes[ZERO_POINTS] = (blocks, "int8")
        if form.order:
            shapes[ORDER] = (self.shape[1:], "int32")
        return shapes

    def _by_block(self, groups: Tensor) -> Tensor:
        form = self.form
        assert form is not None
        return groups.repeat_interleave(self.shape[1] // self.groups // form.block, 1).contiguous()

    def _finite_scales(self, read: Read) -> Tensor:
        scales = self._group_scales(read).float()
        if not bool(torch.isfinite(scales).all()):
            raise ExportError(f"{self.path}: scales are not finite; download it again")
        return scales.contiguous()


def _block(size: int) -> int:
    """The largest power of two that divides `size`, at most 128."""
    return math.gcd(size, WIDEST_BLOCK)


def expect(headers: Headers, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
    """`name`. Raises ExportError where the tensor is missing, or has another shape or type."""
    if name not in headers:
        raise ExportError(
            f"the checkpoint has no tensor {name!r}, which belongs to its quantized matrix; download it again"
        )
    if headers.shape(name) != shape or headers.dtype(name) not in dtypes:
        raise ExportError(
            f"tensor {name} is {headers.dtype(name)} {list(headers.shape(name))}, not {' or '.join(dtypes)} {list(shape)}; "
            "download it again"
        )
    return name


def matrix_shape(headers: Headers, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
    """Shape of a tensor that must be a matrix of one of these types, without an empty side. Raises ExportError."""
    if name not in headers:
        raise ExportError(
            f"the checkpoint has no tensor {name!r}, which belongs to its quantized matrix; download it again"
        )
    shape = headers.shape(name)
    if len(shape) != 2 or 0 in shape or headers.dtype(name) not in dtypes:
        raise ExportError(
            f"tensor {name} is {headers.dtype(name)} {list(shape)}, not a matrix of {' or '.join(dtypes)}; download it again"
        )
    return shape[0], shape[1]


def modules_with(headers: Headers, main: str, others: tuple[str, ...]) -> list[str]:
    """Paths of the modules that hold a tensor `main`. Raises ExportError where a module holds one of `others` without it."""
    paths = {name.removesuffix(f".{main}") for name in headers if name.endswith(f".{main}")}
    for name in headers:
        path, _, own = name.rpartition(".")
        if own in others and path not in paths:
            raise ExportError(
                f"tensor {name} belongs to no {path}.{main}, which the checkpoint does not hold; download it again"
            )
    return sorted(paths)
