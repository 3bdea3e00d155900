"""A checkpoint's tensors, of which some matrices are rounded to integers when they are read."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .blocks import packed, quantize, unpacked
from .matrix import INTEGERS, SCALES, QuantizedMatrix, integer_bytes, matrix_of, part_shape
from .reading import read_dequantized


class RoundedTensors:
    """`tensors` with the matrices of `quantized` as integers and scales beside them (`matrix.py`); reading such a matrix itself
    gives what these say, float32.

    Every matrix is rounded once: a build reads it for its file and for each reference that it is compared with. Integers
    and scales wait in a temporary file, which is in `folder`.
    """

    def __init__(
        self, tensors: Any, quantized: Mapping[str, QuantizedMatrix], folder: Path | None = None
    ) -> None:
        self.base = tensors
        self._own = dict(quantized)
        self.quantized = {**getattr(tensors, "quantized", {}), **self._own}
        """Matrices that are integers: those that are rounded here, and those of the checkpoint."""
        self._folder = folder
        self._file: Any = None
        self._places: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def __contains__(self, name: str) -> bool:
        return matrix_of(name) in self._own or name in self.base

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    @property
    def waiting_bytes(self) -> int:
        """What integers and scales take in the temporary file when every matrix is rounded."""
        return sum(integer_bytes(kind, math.prod(self.base.shape(name))) for name, kind in self._own.items())

    def order(self, name: str) -> tuple[int, int]:
        """That of the matrix."""
        return self.base.order(matrix_of(name) if matrix_of(name) in self._own else name)

    def dtype(self, name: str) -> str:
        """Of a rounded matrix float32."""
        return "float32" if name in self._own else self.base.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor or of a part of a matrix."""
        matrix = matrix_of(name)
        if matrix not in self._own:
            return self.base.shape(name)
        shape = self.base.shape(matrix)
        return part_shape(name, self._own[matrix], shape)

    def place(self, name: str) -> Any:
        """None for what does not lie in the checkpoint's files."""
        return None if matrix_of(name) in self._own else self.base.place(name)

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, integers as int8, or a rounded matrix in float32."""
        matrix = matrix_of(name)
        if matrix not in self._own:
            return self.base.read(name)
        if name == matrix:
            return read_dequantized(self, name)
        if matrix not in self._places:
            self._round(matrix)
        return self._part(matrix, name.removeprefix(matrix))

    def _round(self, matrix: str) -> None:
        kind, tensor = self._own[matrix], self.base.read(matrix)
        integers, scales = quantize(tensor.t() if kind.transposed else tensor, kind.dtype, kind.block)
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - as long as the object lives
        self._file.seek(0, 2)
        self._places[matrix] = self._file.tell(), tuple(integers.shape), tuple(scales.shape)
        stored = packed(integers) if kind.dtype == "int4" else integers.reshape(-1)
        for part in (scales, stored):
            self._file.write(part.contiguous().view(torch.uint8).numpy().data)

    def _part(self, matrix: str, suffix: str) -> torch.Tensor:
        start, shape, scales_shape = self._places[matrix]
        kind = self._own[matrix]
        scale_bytes = 4 * scales_shape[0] * scales_shape[1]
        if suffix == SCALES:
            return self._bytes(start, scale_bytes).view(torch.float32).view(scales_shape)
        if suffix != INTEGERS:
            raise KeyError(matrix + suffix)
        count = shape[0] * shape[1]
        if kind.dtype == "int4":
            return unpacked(self._bytes(start + scale_bytes, -(-count // 2)), count).view(shape)
        return self._bytes(start + scale_bytes, count).view(torch.int8).view(shape)

    def _bytes(self, start: int, count: int) -> torch.Tensor:
        self._file.seek(start)
        return torch.frombuffer(bytearray(self._file.read(count)), dtype=torch.uint8)
