"""A buffer that the host fills and an engine reads, written without a copy where the engine allows it."""

from __future__ import annotations

import math

import numpy as np

from .base import DTYPES, Engine, View


class HostBuffer:
    """Engine memory with a host side. With `host_memory` engines both are the same bytes and `push` does nothing.

    Shapes are contiguous layouts from the start of the buffer: every (width, length) has its own.
    """

    __slots__ = ("_direct", "_engine", "_flat", "buffer")

    def __init__(self, engine: Engine, name: str, size: int, dtype: str):
        self._engine = engine
        self._direct = getattr(engine, "host_memory", False)
        self.buffer = engine.allocate(name, (size,), dtype)
        self._flat: np.ndarray | None = (
            engine.read(engine.view(self.buffer, (size,))) if self._direct else np.zeros(size, DTYPES[dtype])
        )

    def host(self, shape: tuple[int, ...]) -> np.ndarray:
        """The host side in this shape; writable."""
        assert self._flat is not None
        return self._flat[: math.prod(shape)].reshape(shape)

    def view(self, shape: tuple[int, ...]) -> View:
        """The engine side in this shape."""
        return self._engine.view(self.buffer, shape)

    def push(self, shape: tuple[int, ...]) -> None:
        """Bring what the host wrote in this shape to the engine."""
        if not self._direct:
            self._engine.write(self.view(shape), self.host(shape))
