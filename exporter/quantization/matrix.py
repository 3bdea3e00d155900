"""How one matrix is stored as integers, and the names of the tensors that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .blocks import BLOCK

INTEGERS, SCALES, ZERO_POINTS, ORDER = "/integers", "/scales", "/zero_points", "/order"
"""What stands behind a matrix's name in the names of the tensors that it becomes: int8 [out, in], float32
[out, in / block], int8 [out, in / block] and int32 [in]. The last two are there where `QuantizedMatrix` says so."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [out, in] of integers.

    `dtype` is int8 or int4, whose integers lie in −8 … 7; `block` inputs share a scale, and a zero point where there are
    `zero_points`. With an `order`, column i of the integers belongs to input `order[i]`: blocks are of inputs that do not
    stand side by side (`g_idx` of GPTQ). Where the checkpoint stores the matrix itself `transposed`, [in, out] (GPT-2's
    `Conv1D`), its parts are [out, in] all the same.
    """

    dtype: str
    block: int = BLOCK
    zero_points: bool = False
    order: bool = False
    transposed: bool = False


def part_shape(name: str, matrix: QuantizedMatrix, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the part `name` of a matrix that the checkpoint stores with `shape`; `shape` for the matrix itself."""
    if matrix_of(name) == name:
        return tuple(shape)
    out_features, in_features = reversed(shape) if matrix.transposed else shape
    if name.endswith(ORDER):
        return (in_features,)
    return (out_features, in_features if name.endswith(INTEGERS) else in_features // matrix.block)


def matrix_of(name: str) -> str:
    """The name of the matrix that a tensor of `name` is a part of, or `name` itself."""
    for suffix in (INTEGERS, SCALES, ZERO_POINTS, ORDER):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def integer_bytes(matrix: QuantizedMatrix, count: int) -> int:
    """What a matrix of `count` numbers takes, about: its integers, scales of 4 bytes and zero points."""
    blocks = count // matrix.block
    numbers = count + (blocks if matrix.zero_points else 0)
    return (-(-numbers // 2) if matrix.dtype == "int4" else numbers) + 4 * blocks
