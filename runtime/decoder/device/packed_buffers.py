"""Memory of a cycle, laid out field after field at the addresses that an engine can bind."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...engines.base import DTYPES, Engine, View

INT, FLOAT, FLAG = 8, 4, 1
"""Bytes of an int64, a float32, a bool."""


class Fields:
    """A buffer of fields with so many bytes each, by name."""

    def __init__(self, engine: Engine, name: str, sizes: Mapping[str, int]):
        self._unit, end = max(engine.alignment, INT), 0
        self.sizes = dict(sizes)
        self.starts: dict[str, int] = {}
        """Byte at which each begins."""
        for field, nbytes in sizes.items():
            self.starts[field] = end
            end += self.apart(nbytes)
        self.whole = engine.allocate(name, end).view((end,), "uint8")
        """uint8 [n]"""

    def apart(self, nbytes: int) -> int:
        """From a field of so many bytes to the next one."""
        return -(-nbytes // self._unit) * self._unit

    def view(self, field: str, *shape: int, dtype: str = "int64", offset: int = 0) -> View:
        """A field, or a part of it from element `offset` on."""
        start = self.starts[field] // DTYPES[dtype].itemsize + offset
        return self.whole.buffer.view(shape, dtype, start)


class HostFields:
    """Fields where the host has them: parts of `memory`, uint8 [n], as arrays that are made once."""

    def __init__(self, fields: Fields, memory: np.ndarray):
        self._fields, self._memory = fields, memory
        self._made: dict[str, np.ndarray] = {}
        self._many: dict[str, np.ndarray] = {}

    def one(self, field: str, dtype: np.dtype, shape: tuple[int, ...] = (-1,)) -> np.ndarray:
        """A field; type and shape are those of the first time."""
        array = self._made.get(field)
        if array is None:
            start = self._fields.starts[field]
            part = self._memory[start : start + self._fields.sizes[field]]
            array = self._made[field] = part.view(dtype).reshape(shape)
        return array

    def each(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The fields NAME.0 … NAME.(n − 1), which were laid out one behind the other with one size, as one array of
        `shape` [n, ...]; type and shape are those of the first time."""
        array = self._many.get(name)
        if array is None:
            fields, count = self._fields, shape[0]
            start, nbytes = fields.starts[f"{name}.0"], fields.sizes[f"{name}.0"]
            apart = fields.apart(nbytes)
            memory = self._memory[start : start + count * apart].reshape(count, apart)[:, :nbytes]
            array = self._many[name] = memory.view(dtype).reshape(shape)
        return array
