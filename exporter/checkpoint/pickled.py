"""Files of tensors that torch pickled (`.pt`, `.bin`). No code of theirs is run: PyTorch reads them with `weights_only=True`."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path

import torch
from torch import Tensor

from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..common.one_line import first_line

_FOREIGN = re.compile(r"GLOBAL ([\w.]{1,80})")
"""Where PyTorch names what a pickle asks for beside tensors."""


def load_pickled(path: Path, *, mapped: bool = False, device: str = "cpu") -> dict[str, Tensor]:
    """Name → tensor of such a file, `mapped` in place of read. Raises ExportError with one line.

    Whether the tensors hold plain numbers is not asked (`plain.py`).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of formats that PyTorch calls old: the tensors are the same
            tensors = torch.load(path, map_location=device, weights_only=True, mmap=mapped or None)
    except Exception as error:  # PyTorch's reader raises many kinds on damaged bytes
        raise_if_foreign(error)
        raise ExportError(f"{path} cannot be read: {_reason(error)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ExportError(f"{path} is not a mapping of names to tensors")
    return {str(name): value for name, value in tensors.items()}


def _reason(error: Exception) -> str:
    """PyTorch's own words recommend to load the file unsafely."""
    if not isinstance(error, pickle.UnpicklingError):
        return first_line(error)
    foreign = _FOREIGN.search(str(error))
    if foreign is not None:
        return f"it holds {foreign[1]}, and not tensors alone; save the tensors as safetensors"
    return "it is damaged, or holds more than tensors; save the tensors as safetensors"
