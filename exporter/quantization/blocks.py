"""Matrices of drafts as block-scaled integers: `DequantizeLinear` in front of the product that reads them.

Pure functions. A matrix [out, in] is cut into blocks of `BLOCK` inputs; each block has a scale, and its numbers are
integers of 8 or 4 bits times that scale. There is no zero point: TensorRT takes none, and weights lie around zero. Only
what a draft brings along is stored so, never what the target reads: a draft is right or wrong, so that the tokens of the
output stay the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.precisions import INTEGERS as INTEGER_TYPES

BLOCK = 32
"""Inputs that share a scale: the smallest block for which every engine at hand has a kernel."""

LIMITS: dict[str, int] = dict(zip(INTEGER_TYPES, (127, 7), strict=True))
"""dtype → the integer that the largest number of a block becomes; one more fits below zero."""

SHRINKS = {"int8": (1.0,), "int4": (1.0, 0.95, 0.9, 0.875, 0.85, 0.8)}
"""Shares of the largest number that a scale is tried for. With so few integers it pays to clip: 7 / 8 is the scale with which
a negative extreme is the integer −8."""

SMALLEST = 2.0**-24
"""Smallest scale: what float16 can still hold, for a scale must be positive."""

INTEGERS, SCALES = "/integers", "/scales"
"""What stands behind a matrix's name in the names of the two tensors that it becomes."""


def quantizable(shape: Sequence[int]) -> bool:
    """Whether a tensor of that shape, [out, in] as PyTorch keeps it, is a matrix of whole blocks."""
    return len(shape) == 2 and shape[1] > 0 and shape[1] % BLOCK == 0


def quantize(matrix: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """(integers int8 [out, in], scales float32 [out, in / BLOCK]) of a float matrix [out, in], which `quantizable` knows.

    `dtype` is a key of `LIMITS`; integers of int4 lie in −8 … 7. Of the scales tried, each block gets the one with the
    least squared error; the first of them clips nothing, so that no block is further off than by plain rounding. A number
    that is not finite makes its block's scale so, and whoever stores that refuses it.
    """
    limit = LIMITS[dtype]
    blocks = matrix.detach().float().reshape(matrix.shape[0], -1, BLOCK)
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


def dequantize(integers: Tensor, scales: Tensor) -> Tensor:
    """The matrix float32 [out, in] that `DequantizeLinear` makes of what `quantize` gave; `scales` of any float type."""
    return (integers.unflatten(1, (-1, BLOCK)).float() * scales.float()[..., None]).flatten(1)


def packed(integers: Tensor) -> Tensor:
    """Integers of 4 bits (int8, in −8 … 7) as ONNX stores them: uint8 [ceil(n / 2)], the first of two in the low half."""
    flat = integers.reshape(-1).to(torch.uint8) & 15
    if len(flat) % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    return flat[0::2] | (flat[1::2] << 4)
