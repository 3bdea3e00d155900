"""Which tensors hold plain numbers, and which of them are weights: one rule for checkpoints, adapters and drafts."""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_DTYPES = ("float16", "bfloat16", "float32", "float64")
WHOLE_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool")
"""Of tables of ids and flags beside the weights."""

SLICE = 1 << 24
"""Numbers that are looked at together: what that takes in memory is bounded."""


def dtype_name(tensor: Tensor) -> str:
    """`float16`, ...: PyTorch's name without the package."""
    return str(tensor.dtype).removeprefix("torch.")


def plain_problem(tensor: Tensor) -> str | None:
    """Why a tensor does not hold plain numbers, as the end of "NAME …"; None where it does.

    Plain are dense tensors in memory whose numbers are whole, or floats of 16, 32 or 64 bits.
    """
    if tensor.is_quantized:
        return "is quantized"
    if tensor.is_nested:
        return "is nested"
    if tensor.layout != torch.strided:
        return f"is sparse ({str(tensor.layout).removeprefix('torch.')})"
    if tensor.device.type != "cpu":
        return f"has no numbers in the file (it is on the device {tensor.device.type!r})"
    if dtype_name(tensor) not in (*WEIGHT_DTYPES, *WHOLE_DTYPES):
        return f"is {dtype_name(tensor)}"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return "repeats numbers in place of holding them (an expanded view)"
    return None


def weight_problem(tensor: Tensor) -> str | None:
    """Why a tensor is no weight, as the end of "NAME …"; None for one whose numbers are floats of 16, 32 or 64 bits and
    finite, in float32 too."""
    if problem := plain_problem(tensor):
        return problem
    if dtype_name(tensor) not in WEIGHT_DTYPES:
        return f"is {dtype_name(tensor)}"
    parts = tensor.detach().reshape(-1).split(SLICE)
    if not all(bool(torch.isfinite(part.float()).all()) for part in parts):
        return "holds numbers that are not finite in float32"
    return None
