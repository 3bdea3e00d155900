"""A buffer that the host fills and an engine reads, written without a copy where the engine allows it."""

from __future__ import annotations

import math

import numpy as np

from .base import DTYPES, Engine, View


class HostBuffer:
    """Engine memory with a host side. With `host_memory` engines both are the same bytes and `push` does nothing.

    Shapes are contiguous layouts from the start of the buffer: every (width, length) has its own.
    """

    __slots__ = ("_direct", "_dtype", "_engine", "_flat", "buffer")

    def __init__(self, engine: Engine, name: str, size: int, dtype: str):
        """`size` counts elements of `dtype`."""
        self._engine, self._dtype = engine, dtype
        self._direct = engine.host_memory
        self.buffer = engine.allocate(name, size * DTYPES[dtype].itemsize)
        whole = self.buffer.view((size,), dtype)
        self._flat: np.ndarray = engine.read(whole) if self._direct else np.zeros(size, DTYPES[dtype])

    def host(self, shape: tuple[int, ...]) -> np.ndarray:
        """The host side in this shape; writable."""
        return self._flat[: math.prod(shape)].reshape(shape)

    def view(self, shape: tuple[int, ...]) -> View:
        """The engine side in this shape."""
        return self.buffer.view(shape, self._dtype)

    def push(self, shape: tuple[int, ...]) -> None:
        """Bring what the host wrote in this shape to the engine; the host side may be written again at once."""
        if not self._direct:
            # An engine with a queue takes the bytes later, when the host may already prepare the next pass.
            self._engine.write(self.view(shape), self.host(shape).copy())
