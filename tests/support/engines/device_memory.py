"""The memory of a device that is not there: addresses of its own, and for every byte what it holds.

A byte is undefined until it is written, defined when it was allocated as zero, written when a transfer or a graph put a
value there.
"""

from __future__ import annotations

import numpy as np
from vlmexport.runtime.engines.base import Buffer, View

from . import memory

PAGE = 512
UNDEFINED, DEFINED, WRITTEN = 0, 1, 2
GARBAGE = 1e3
"""What rejected cache rows hold. Finite, since a masked row is multiplied by zero, and far too large to go unseen."""


class DeviceMemory:
    """See the module."""

    def __init__(self) -> None:
        self._next = 1 << 32
        self._private: dict[int, Buffer] = {}
        self._state: dict[int, np.ndarray] = {}  # uint8 per byte

    def __len__(self) -> int:
        return len(self._private)

    def allocate(self, name: str, nbytes: int, zeroed: bool) -> Buffer:
        """A buffer without `data`: the host cannot look into it."""
        buffer = Buffer(name, int(nbytes), self._next)
        self._next += -(-buffer.nbytes // PAGE) * PAGE + PAGE  # two buffers never touch
        self._private[buffer.address] = memory.allocate(name, buffer.nbytes, zeroed)
        self._state[buffer.address] = np.full(buffer.nbytes, DEFINED if zeroed else UNDEFINED, np.uint8)
        return buffer

    def own(self, buffer: Buffer) -> None:
        """Refuse a buffer of the host or of another engine."""
        known = self._private.get(buffer.address)
        assert buffer.data is None and known is not None and known.nbytes == buffer.nbytes, (
            f"{buffer!r} is not of this device"
        )

    def private(self, view: View) -> View:
        """The same view of the private memory; refuses one that leaves its buffer."""
        self.own(view.buffer)
        found = View(self._private[view.buffer.address], view.shape, view.dtype, view.offset)
        memory.array(found)
        return found

    def array(self, view: View) -> np.ndarray:
        """The values."""
        return memory.array(self.private(view))

    def state(self, view: View) -> np.ndarray:
        """UNDEFINED, DEFINED or WRITTEN for every byte, [*shape, bytes of an element]."""
        self.own(view.buffer)
        start = view.address - view.buffer.address
        part = self._state[view.buffer.address][start : start + view.nbytes]
        return part.reshape(*view.shape, view.nbytes // max(1, view.size))

    def copy(self, target: View, source: View) -> None:
        """Bytes and what is known of them."""
        self.array(target).reshape(-1).view(np.uint8)[...] = self.array(source).reshape(-1).view(np.uint8)
        self.state(target).reshape(-1)[...] = self.state(source).reshape(-1)
