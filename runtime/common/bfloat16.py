"""Numbers as they lie in buffers: numpy has no bfloat16, so its bits are held as uint16, the upper half of a float32."""

from __future__ import annotations

import numpy as np


def widen(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` as `dtype`, any float type; uint16 holds bfloat16 bits on both sides."""
    if array.dtype == dtype:
        return array
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return bfloat16_bits(array) if dtype == np.uint16 else array.astype(dtype)


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """float [...] rounded to the nearest bfloat16, ties to even, as uint16 bits."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def lowest(dtype: np.dtype) -> float:
    """The smallest finite number of a float type, as a float."""
    if dtype == np.uint16:
        return float(widen(np.array(0xFF7F, np.uint16), np.dtype(np.float32)))
    return float(np.finfo(dtype).min)


def masked_value(dtype: np.dtype) -> np.ndarray:
    """The additive "minus infinity" of a float type, as it lies in a buffer: half of the smallest finite value, so that
    adding a bias cannot overflow."""
    return widen(np.array(lowest(dtype) / 2), dtype)
