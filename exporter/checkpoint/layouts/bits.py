"""Integers of 4 and 8 bits in words of 32, and their signed form. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a word's eight nibbles, counted from the lowest, holds the first, second, … of eight neighbors in AWQ's GEMM
layout (`AWQ_REVERSE_ORDER` of AutoAWQ, awq/utils/packing_utils.py)."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """uint8 [rows, n * 32 / bits] of int32 [rows, n]: the lowest bits of a word first. `bits` is 4 or 8."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def unpack_awq(words: Tensor) -> Tensor:
    """uint8 [rows, n * 8] of int32 [rows, n], in AWQ's order of nibbles."""
    return unpack(words, 4).unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)


def signed(codes: Tensor, bits: int) -> Tensor:
    """int8 in −8 … 7 or −128 … 127 of uint8 in 0 … 15 or 0 … 255: less the middle."""
    if bits == 8:
        return (codes ^ 128).view(torch.int8)
    return codes.view(torch.int8) - 8
