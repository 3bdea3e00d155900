"""A window of a resized picture, without the rest of it: bit for bit what Pillow's `resize` and a crop give.

Pillow resizes along one side after the other, the width first, with weights of 22 bits and rounded to 8 bits in between
(`Resample.c`). Along the side that is cut the same sums are made here, for the rows or columns of the window alone: of a
picture of 1 × 20,000 pixels the whole would have gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from PIL import Image
from PIL.Image import Resampling

from ..pixels import pixels_of

_BITS = 22

_Filter = Callable[[np.ndarray], np.ndarray]
"""Weights of distances, float64 → float64, both of any shape."""


def resized_window(
    image: Image.Image, size: tuple[int, int], axis: int, start: int, count: int, resample: Resampling
) -> np.ndarray:
    """uint8 [H, W, 3] of an RGB image that is resized to `size` (width, height), of which only `count` rows (`axis` 0)
    or columns (1) from `start` on are made. `size` is no smaller than the image: Pillow may take the sides of others in the
    other order. `resample` is any filter but nearest."""
    width, height = image.size
    have, make = ((height, size[1]), (width, size[0]))[1 if axis else 0]
    first, weights = _weights(have, make, start, count, resample)
    low, high = int(first.min()), int(min((first + weights.shape[1]).max(), have))
    if axis == 0:  # the width first, of the rows that count
        part = image.crop((0, low, width, high)).resize((size[0], high - low), resample)
        return _summed(pixels_of(part), first - low, weights)
    part = pixels_of(image.crop((low, 0, high, height))).transpose(1, 0, 2)
    cut = Image.fromarray(np.ascontiguousarray(_summed(part, first - low, weights).transpose(1, 0, 2)))
    return pixels_of(cut.resize((count, size[1]), resample))


def _weights(
    have: int, make: int, start: int, count: int, resample: Resampling
) -> tuple[np.ndarray, np.ndarray]:
    """(where each sum begins int64 [count], weights int64 [count, taps]) for `make` pixels of `have`."""
    weigh, reach = _FILTERS[resample]
    scale = have / make
    widest = max(scale, 1.0)
    support = reach * widest
    centre = (np.arange(start, start + count) + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + support + 0.5).astype(np.int64), have)
    at = first[:, None] + np.arange(math.ceil(support) * 2 + 1)
    weights = weigh((at - centre[:, None] + 0.5) * (1.0 / widest))
    weights[at >= last[:, None]] = 0.0
    weights = weights / np.add.accumulate(weights, axis=1)[:, -1:]
    return first, np.trunc(weights * (1 << _BITS) + np.where(weights < 0, -0.5, 0.5)).astype(np.int64)


def _summed(pixels: np.ndarray, first: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """uint8 [count, …] of uint8 [n, …]."""
    total = np.full((len(first), *pixels.shape[1:]), 1 << (_BITS - 1), np.int64)
    for tap in range(weights.shape[1]):
        total += pixels[np.minimum(first + tap, len(pixels) - 1)] * weights[:, tap, None, None]
    return np.clip(total >> _BITS, 0, 255).astype(np.uint8)


def _box(x: np.ndarray) -> np.ndarray:
    return ((x > -0.5) & (x <= 0.5)).astype(np.float64)


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _hamming(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    angle = np.where(x == 0, 1.0, x) * math.pi
    values = np.where(x == 0, 1.0, np.sin(angle) / angle * (0.54 + 0.46 * np.cos(angle)))
    return np.where(x < 1.0, values, 0.0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    x, a = np.abs(x), -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: np.ndarray) -> np.ndarray:
    angle = np.where(x == 0, 1.0, x) * math.pi
    return np.where(x == 0, 1.0, np.sin(angle) / angle)


_FILTERS: dict[Resampling, tuple[_Filter, float]] = {
    Resampling.BOX: (_box, 0.5),
    Resampling.BILINEAR: (_bilinear, 1.0),
    Resampling.HAMMING: (_hamming, 1.0),
    Resampling.BICUBIC: (_bicubic, 2.0),
    Resampling.LANCZOS: (_lanczos, 3.0),
}
"""Filter → its weights, and how far it reaches in pixels."""
