"""Memory of a cycle, laid out field after field at the addresses that an engine can bind."""

from __future__ import annotations

from collections.abc import Mapping

from ..engines.base import DTYPES, Engine, View

INT, FLOAT, FLAG = 8, 4, 1
"""Bytes of an int64, a float32, a bool."""


class Fields:
    """A buffer of fields with so many bytes each, by name."""

    def __init__(self, engine: Engine, name: str, sizes: Mapping[str, int]):
        unit, end = max(engine.alignment, INT), 0
        self.starts: dict[str, int] = {}
        """Byte at which each begins."""
        for field, nbytes in sizes.items():
            self.starts[field] = end
            end += -(-nbytes // unit) * unit
        self.whole = engine.allocate(name, end).view((end,), "uint8")
        """uint8 [n]"""

    def view(self, field: str, *shape: int, dtype: str = "int64", offset: int = 0) -> View:
        """A field, or a part of it from element `offset` on."""
        start = self.starts[field] // DTYPES[dtype].itemsize + offset
        return self.whole.buffer.view(shape, dtype, start)
