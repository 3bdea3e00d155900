"""Integers by rounding alone: no data is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...exporter.quantization.blocks import BLOCK, LIMITS, SMALLEST, quantize, rows_together

SCALE_TYPES = {torch.float32: torch.float16, torch.float64: torch.float16}
"""Type of a stored weight → that of which its scales are values, else its own: a bundle in float16 then keeps the scales, and
the integers stay the nearest."""


def scale_type(stored: torch.dtype) -> torch.dtype:
    """The type whose values the scales of a tensor that is `stored` so are."""
    return SCALE_TYPES.get(stored, stored)


def narrowed(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive scales float32 as the nearest values of `dtype`, none of them zero."""
    return scales.clamp(min=SMALLEST).to(dtype).float()


def round_matrix(
    matrix: Tensor, dtype: str, block: int = BLOCK, scales: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(integers int8 [out, in], scales float32 [out, in / block], values of the type `scales`) of a float matrix [out, in]:
    the nearest integers, with the best of some scales for each block (`quantize`)."""
    integers, best = quantize(matrix, dtype, block)
    kept = narrowed(best, scales)
    if torch.equal(kept, best):
        return integers, best
    together = rows_together(matrix)
    pairs = zip(matrix.split(together), kept.split(together), strict=True)
    return torch.cat([nearest(rows, own, dtype) for rows, own in pairs]), kept


def nearest(matrix: Tensor, scales: Tensor, dtype: str) -> Tensor:
    """The integers int8 [out, in] nearest to a matrix [out, in] with scales [out, blocks]."""
    limit = LIMITS[dtype]
    blocks = matrix.detach().float().unflatten(1, (scales.shape[1], -1))
    return (blocks / scales[..., None]).round_().clamp_(-limit - 1, limit).to(torch.int8).flatten(1)
