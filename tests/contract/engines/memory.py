"""Buffers and views in numpy memory for the engines of the tests."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(eq=False)
class Buffer:
    """Memory of one allocation; `memory` is flat."""

    name: str
    memory: np.ndarray
    shape: tuple[int, ...]
    dtype: str


@dataclass(eq=False)
class View:
    """`array` is a window into the memory of `buffer`, `offset` in elements."""

    buffer: Buffer
    array: np.ndarray
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return self.buffer.dtype


def allocate(name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
    """Zeroed memory."""
    return Buffer(name, np.zeros(prod(shape), np.dtype(dtype)), tuple(shape), dtype)


def view(buffer: Buffer, shape: tuple[int, ...], offset: int = 0) -> View:
    """The window of `shape` at `offset` elements; it must lie inside the buffer."""
    size = prod(shape)
    assert 0 <= offset and offset + size <= buffer.memory.size, (
        f"view {shape} at {offset} of buffer {buffer.name!r} reaches element {offset + size}, it has {buffer.memory.size}"
    )
    return View(buffer, buffer.memory[offset : offset + size].reshape(shape), offset)
