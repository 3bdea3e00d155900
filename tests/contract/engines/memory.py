"""Numpy memory behind the `Buffer` and `View` of the engine interface."""

from __future__ import annotations

from math import prod

import numpy as np
from vlmexport.runtime.engines.base import DTYPES, Buffer, View


def allocate(name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
    """Zeroed memory."""
    flat = np.zeros(prod(shape), DTYPES[dtype])
    return Buffer(name, tuple(int(n) for n in shape), dtype, flat.ctypes.data, flat)


def array(view: View) -> np.ndarray:
    """The memory of a view."""
    view.check()
    return view.buffer.data[view.offset : view.offset + view.size].reshape(view.shape)
