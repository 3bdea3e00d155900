"""Matrices as block-scaled integers: `DequantizeLinear` in front of the product that reads them.

Pure functions. A matrix [out, in] is cut into blocks of inputs; each block of an output has a scale, and its numbers are
integers of 8 or 4 bits times that scale. What is rounded here has no zero point: TensorRT takes none, and weights lie around
zero. Published checkpoints may have them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.precisions import INTEGERS as INTEGER_TYPES

BLOCK = 32
"""Inputs that share a scale: the smallest block for which every engine at hand has a kernel."""

PART = 1 << 16
"""Numbers that are rounded together: so many, and what is made of them, stay in a processor's cache, which makes it four times
as fast."""

LIMITS: dict[str, int] = dict(zip(INTEGER_TYPES, (127, 7), strict=True))
"""dtype → the integer that the largest number of a block becomes; one more fits below zero."""

SHRINKS = {"int8": (1.0,), "int4": (1.0, 0.95, 0.9, 0.875, 0.85, 0.8)}
"""Shares of the largest number that a scale is tried for. With so few integers it pays to clip: 7 / 8 is the scale with which
a negative extreme is the integer −8."""

SMALLEST = 2.0**-24
"""Smallest scale: what float16 can still hold, for a scale must be positive."""


def quantizable(shape: Sequence[int], block: int = BLOCK) -> bool:
    """Whether a tensor of that shape, [out, in] as PyTorch keeps it, is a matrix of whole blocks."""
    return len(shape) == 2 and shape[1] > 0 and shape[1] % block == 0


def quantize(matrix: Tensor, dtype: str, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """(integers int8 [out, in], scales float32 [out, in / block]) of a float matrix [out, in], which `quantizable` knows.

    `dtype` is a key of `LIMITS`; integers of int4 lie in −8 … 7. Of the scales tried, each block gets the one with the
    least squared error; the first of them clips nothing, so that no block is further off than by plain rounding. A number
    that is not finite makes its block's scale so, and whoever stores that refuses it.
    """
    parts = [_quantize(rows, dtype, block) for rows in matrix.detach().split(rows_together(matrix))]
    return torch.cat([integers for integers, _ in parts]), torch.cat([scales for _, scales in parts])


def rows_together(matrix: Tensor) -> int:
    """Outputs of a matrix [out, in] that are rounded together."""
    return max(1, PART // matrix.shape[1])


def _quantize(matrix: Tensor, dtype: str, block: int) -> tuple[Tensor, Tensor]:
    limit = LIMITS[dtype]
    blocks = matrix.float().reshape(matrix.shape[0], -1, block)
    peak = blocks.abs().amax(-1)
    best = torch.full_like(peak, torch.inf)
    scales, integers = torch.empty_like(peak), torch.empty_like(blocks, dtype=torch.int8)
    for shrink in SHRINKS[dtype]:
        scale = (peak * (shrink / limit)).clamp(min=SMALLEST)
        rounded = (blocks / scale[..., None]).round().clamp(-limit - 1, limit)
        error = (rounded * scale[..., None] - blocks).square().sum(-1)
        better = ~(error >= best)  # also where it is NaN
        best = torch.where(better, error, best)
        scales = torch.where(better, scale, scales)
        integers = torch.where(better[..., None], rounded.nan_to_num(0).to(torch.int8), integers)
    return integers.reshape(matrix.shape), scales


def dequantize(integers: Tensor, scales: Tensor, zero_points: Tensor | None = None) -> Tensor:
    """The matrix float32 [out, in] that `DequantizeLinear` makes of `integers` [out, in], `scales` of any float type and
    `zero_points` of any integer type, both [out, in / block]."""
    blocks = integers.unflatten(1, (scales.shape[1], -1)).float()
    if zero_points is not None:
        blocks = blocks - zero_points.float()[..., None]
    return (blocks * scales.float()[..., None]).flatten(1)


def packed(integers: Tensor) -> Tensor:
    """Integers of 4 bits (int8, in −8 … 7) as ONNX stores them: uint8 [ceil(n / 2)], the first of two in the low half."""
    flat = integers.reshape(-1).to(torch.uint8) & 15
    if len(flat) % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    return flat[0::2] | (flat[1::2] << 4)


def unpacked(data: Tensor, count: int) -> Tensor:
    """The `count` integers int8 that `packed` gave as uint8."""
    signed = torch.stack([data & 15, data >> 4], 1).reshape(-1)[:count].to(torch.int8)
    return torch.where(signed > 7, signed - 16, signed)
