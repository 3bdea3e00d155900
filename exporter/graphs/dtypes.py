"""Names of types, as the manifest writes them, in ONNX and in PyTorch."""

from __future__ import annotations

import onnx_ir as ir
import torch

ONNX = {
    "float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16,
    "int64": ir.DataType.INT64, "int32": ir.DataType.INT32, "int8": ir.DataType.INT8, "uint8": ir.DataType.UINT8,
    "bool": ir.DataType.BOOL, "int4": ir.DataType.INT4,
}  # fmt: skip
"""Every type that a manifest may name, and what drafts' matrices may be stored as."""

NAMES = {kind: name for name, kind in ONNX.items()}
"""ONNX → name."""

TORCH = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64,
    "int32": torch.int32, "int8": torch.int8, "int4": torch.int8,
}  # fmt: skip
"""What the weights file may hold, in PyTorch, which has no int4."""


def stored_bytes(dtype: str, count: int) -> int:
    """Bytes of so many numbers in the weights file; two of int4 share one."""
    return -(-count // 2) if dtype == "int4" else count * TORCH[dtype].itemsize
