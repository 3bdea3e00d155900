"""What a bundle computes with in place of a matrix of integers."""

from __future__ import annotations

from typing import Any

import torch

from .blocks import dequantize
from .matrix import INTEGERS, ORDER, SCALES, ZERO_POINTS


def read_dequantized(tensors: Any, name: str, scales: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix `name` of `tensors`, which are stored as integers, float32 as the checkpoint has it; its scales are rounded
    to the type `scales`, as a bundle stores them."""
    kind = tensors.quantized[name]
    zero_points = tensors.read(name + ZERO_POINTS) if kind.zero_points else None
    matrix = dequantize(tensors.read(name + INTEGERS), tensors.read(name + SCALES).to(scales), zero_points)
    if kind.order:
        straight = torch.empty_like(matrix)
        straight[:, tensors.read(name + ORDER).long()] = matrix
        matrix = straight
    return matrix.t().contiguous() if kind.transposed else matrix
