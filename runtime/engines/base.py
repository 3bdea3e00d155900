"""What an engine is: it executes named graphs on buffers that it allocated.

Everything above (arena, masks, decoder, cycle) is the same code for every engine, so an engine knows nothing
about tokens, lengths or drafts. All shapes and addresses are fixed when a call is bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # storage only: numpy has no bfloat16
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
"""numpy storage type of every dtype name of a manifest."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory with a fixed address for the life of the engine; `data` is what the engine needs to reach it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    address: int
    data: Any = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, eq=False)
class View:
    """A contiguous part of a buffer, seen with a shape of its own; `offset` counts elements."""

    buffer: Buffer
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def dtype(self) -> str:
        return self.buffer.dtype

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset * DTYPES[self.buffer.dtype].itemsize

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def check(self) -> View:
        """Raise `ValueError` when the view leaves its buffer."""
        if self.offset < 0 or self.offset + self.size > self.buffer.size:
            raise ValueError(
                f"view {self.shape} at element {self.offset} leaves buffer {self.buffer.name!r} "
                f"of {self.buffer.size} elements"
            )
        return self


class Call(Protocol):
    """A graph bound to buffers."""

    def run(self) -> None: ...


@runtime_checkable
class Engine(Protocol):
    """Executes graphs. An engine whose `read` returns the memory itself may set `host_memory = True`:
    the runtime then writes masks, tokens and rows straight into its buffers and skips `write`."""

    name: str
    static_cache: bool
    """True: the `cache` dimension is frozen to the capacity; False: any length may be bound."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
        """A zeroed buffer with a fixed address."""
        ...

    def view(self, buffer: Buffer, shape: tuple[int, ...], offset: int = 0) -> View:
        """A contiguous view; `offset` in elements. Raises `ValueError` outside the buffer."""
        ...

    def constant(self, name: str, array: np.ndarray) -> View:
        """A read-only input, for instance the memory-mapped embedding table; not copied where it can be helped."""
        ...

    def bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        """Fix shapes and addresses of every input and output. An output may share its address with an input."""
        ...

    def write(self, view: View, array: np.ndarray) -> None:
        """Host to engine; `array` has the view's shape and dtype."""
        ...

    def read(self, view: View) -> np.ndarray:
        """Engine to host; a CPU engine returns the memory itself."""
        ...
