"""A quantized checkpoint's tensors as those of an ordinary one: each matrix under its own name, its integers beside it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from ...runtime.common.errors import ExportError, UnsupportedModelError
from ..common.memory import CheckpointMemory, widened_bytes
from ..quantization.matrix import matrix_of
from .layouts.layout import Layout
from .layouts.matrix import IntegerMatrix, StoredMatrix
from .layouts.settings import REMEDY
from .tensors import Place, TensorFiles


class IntegerTensors(TensorFiles):
    """The tensors of `files`, with every matrix M that `layout` describes in place of the tensors that it is made of.

    `read(M)` is the matrix in float32; the names in `quantized` also have the parts that `QuantizedMatrix` tells of. One
    matrix at a time is in memory. Raises ExportError where tensors are missing or do not fit, and UnsupportedModelError
    where no matrix is stored so.
    """

    def __init__(self, files: TensorFiles, layout: Layout) -> None:
        vars(self).update(vars(files))  # the files are the same
        vars(self).pop("_fingerprint", None)
        self.readable = files.readable
        self._stored, self._layout = files, layout
        self._matrices = {matrix.name: matrix for matrix in self._described()}
        self.quantized = {name: form for name, m in self._matrices.items() if (form := m.form) is not None}
        self.notices = layout.notices
        self._transposed: frozenset[str] = frozenset()
        ends = tuple(f".{end}" for end in layout.beside)
        parts = {part for matrix in self._matrices.values() for part in matrix.parts}
        self._plain = frozenset(
            name for name in files if name not in parts and not (ends and name.endswith(ends))
        )

    def _described(self) -> list[StoredMatrix]:
        files = self._stored
        try:
            matrices = self._layout.matrices(files)
            if files.readable:
                matrices = [matrix.check(files.read) for matrix in matrices]
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{files.folder}: {error}") from None
        except ExportError as error:
            raise ExportError(f"{files.folder}: {error}") from None
        if not matrices:
            raise UnsupportedModelError(
                f"{files.folder}: quantized by {self._layout.identity.partition('|')[0]!r}, but no tensor is stored so; {REMEDY}"
            )
        for matrix in matrices:
            if matrix.name in files and matrix.name not in matrix.parts:
                raise ExportError(
                    f"{files.folder}: {matrix.name} is stored twice, as floats and as {matrix.parts[0]}; download it again"
                )
        return matrices

    def transpose(self, names: Collection[str]) -> None:
        """Gives the matrices `names`, of modules that keep them as [in, out], so; their integers stay [out, in]."""
        self._transposed = frozenset(names) & self._matrices.keys()
        self.quantized = {
            name: replace(form, transposed=name in self._transposed) for name, form in self.quantized.items()
        }

    @property
    def files(self) -> TensorFiles:
        """The tensors as they are stored."""
        return self._stored

    @property
    def identity(self) -> str:
        """What of the configuration changes the numbers that the stored tensors mean."""
        return self._layout.identity

    def __contains__(self, name: str) -> bool:
        return name in self._plain or name in self._matrices or self._part(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._plain, *self._matrices}))

    @property
    def memory(self) -> CheckpointMemory:
        sizes = [
            (shape, self._stored_bytes(name), math.prod(shape) * getattr(torch, self.dtype(name)).itemsize)
            for name in self
            if "float" in self.dtype(name)
            for shape in [self.shape(name)]
        ]
        return CheckpointMemory(
            sum(stored for _, stored, _ in sizes),
            4 * sum(math.prod(shape) for shape, _, _ in sizes),
            max((read for _, _, read in sizes), default=0),
            max((widened_bytes(shape, read) for shape, _, read in sizes), default=0),
        )

    def _stored_bytes(self, name: str) -> int:
        matrix = self._matrices.get(name)
        files = self._stored
        return sum(
            torch.Size(files.shape(part)).numel() * getattr(torch, files.dtype(part)).itemsize
            for part in ((name,) if matrix is None else matrix.parts)
        )

    def order(self, name: str) -> tuple[int, int]:
        matrix = self._matrices.get(matrix_of(name))
        return self._stored.order(name if matrix is None else matrix.parts[0])

    def shape(self, name: str) -> tuple[int, ...]:
        matrix, part = self._matrices.get(name), self._part(name)
        if matrix is not None:
            return tuple(reversed(matrix.shape)) if name in self._transposed else matrix.shape
        return self._stored.shape(self._own(name)) if part is None else part[0]

    def dtype(self, name: str) -> str:
        part = self._part(name)
        if name in self._matrices:
            return "float32"
        return self._stored.dtype(self._own(name)) if part is None else part[1]

    def place(self, name: str) -> Place | None:
        if name in self._matrices or self._part(name) is not None:
            return None
        return self._stored.place(self._own(name))

    def read(self, name: str) -> torch.Tensor:
        files = self._stored
        if name in self._matrices:
            values = self._matrices[name].values(files.read)
            return values.t().contiguous() if name in self._transposed else values
        if self._part(name) is None:
            return files.read(self._own(name))
        matrix = self._matrices[matrix_of(name)]
        assert isinstance(matrix, IntegerMatrix)
        return matrix.part(name.removeprefix(matrix.name), files.read)

    def _part(self, name: str) -> tuple[tuple[int, ...], str] | None:
        """Shape and type of a matrix's part; None for another name."""
        matrix = self._matrices.get(matrix_of(name))
        if name in self._matrices or not isinstance(matrix, IntegerMatrix):
            return None
        return matrix.part_shapes().get(name.removeprefix(matrix.name))

    def _own(self, name: str) -> str:
        if name not in self._plain:
            raise ExportError(f"the checkpoint {self.folder} has no tensor {name!r}")
        return name


def shown_tensors(files: TensorFiles, layout: Layout | None) -> TensorFiles:
    """`files`, or what `layout` makes of them."""
    return files if layout is None else IntegerTensors(files, layout)
