"""What graphs refer to: stored tensors, matrices of integers, and places in the file of weights."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS_FILE = "weights.bin"


@dataclass(frozen=True)
class WeightRef:
    """A stored tensor: checkpoint tensors joined along their first dimension, then perhaps transposed (2-D).

    `dtype` is what graphs are composed with; numbers of "float32" are stored as the bundle's `weights_dtype`, those of
    "int4" two in a byte.
    """

    names: tuple[str, ...]
    transpose: bool
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies: `bytes` from `offset` of a file of the bundle."""

    offset: int
    bytes: int
    file: str = WEIGHTS_FILE


@dataclass(frozen=True)
class IntegerRef:
    """A matrix of integers [in, out]: `scales` and `zero_points` are [in / block, out], `order` is int32 [in]."""

    integers: WeightRef
    scales: WeightRef
    zero_points: WeightRef | None
    order: WeightRef | None
    block: int
