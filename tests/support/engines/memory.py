"""Numpy memory behind the `Buffer` and `View` of the engine interface."""

from __future__ import annotations

import numpy as np
from vlmexport.runtime.engines.base import DTYPES, Buffer, View

ALIGNMENT = 256
"""Of every buffer: as much as any engine asks for."""


POISON = 0xFF
"""In every byte that was not asked for as zero: NaN in every float format, −1 in every integer."""


def allocate(name: str, nbytes: int, zeroed: bool) -> Buffer:
    """Memory of the host."""
    raw = np.full(nbytes + ALIGNMENT, 0 if zeroed else POISON, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    data = raw[start : start + nbytes]
    return Buffer(name, nbytes, data.ctypes.data, data)


def array(view: View) -> np.ndarray:
    """The memory of a view, which must not leave its buffer."""
    dtype = DTYPES[view.dtype]
    start = view.offset * dtype.itemsize
    assert start >= 0 and start + view.nbytes <= view.buffer.nbytes, (
        f"{view.shape} of {view.dtype} at byte {start} leaves {view.buffer.name!r} of {view.buffer.nbytes} bytes"
    )
    return view.buffer.data[start : start + view.nbytes].view(dtype).reshape(view.shape)
