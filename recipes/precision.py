"""Where and in which precision a recipe computes: what the machine has units for, or what the user says."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from vlmexport.runtime.common.errors import OptionError

PRECISIONS = ("auto", "fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")

# x86 names its bfloat16 units in two flags, Arm in one. Without them PyTorch emulates: 2.6 times the time of fp32.
_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}


def has_bf16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies bfloat16 natively; False where the system does not say."""
    try:
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    flags = {f for line in lines if line.startswith(("flags", "Features")) for f in line.split()}
    return bool(flags & _UNITS)


def dtype_of(precision: str, device: str = "cpu") -> torch.dtype:
    """float32 or bfloat16 for a name in `PRECISIONS`; OptionError for another."""
    if precision not in PRECISIONS:
        raise OptionError(f"--precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
    has_units = torch.cuda.is_bf16_supported() if device == "cuda" else has_bf16_units()
    wide = precision == "fp32" or (precision == "auto" and not has_units)
    return torch.float32 if wide else torch.bfloat16


def device_of(name: str) -> str:
    """ "cpu" or "cuda" for a name in `DEVICES`; OptionError for another, and where there is no GPU that PyTorch can use."""
    if name not in DEVICES:
        raise OptionError(f"--device {name!r}: choose one of {', '.join(DEVICES)}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise OptionError(
            f"--device cuda: PyTorch {torch.__version__} finds no GPU; take --device cpu, or a build for CUDA"
        )
    return "cuda" if there and name != "cpu" else "cpu"


def computing(dtype: torch.dtype, device: str = "cpu") -> contextlib.AbstractContextManager[object]:
    """Matrix products inside are computed in `dtype`; parameters stay as they are."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype)
