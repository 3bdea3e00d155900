"""Small files of tensors, which are read whole: adapters, and drafts as others publish them. Nothing in them is trusted."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..common.one_line import first_line
from .pickled import load_pickled
from .plain import plain_problem


def read_weights(path: Path) -> dict[str, Tensor]:
    """Name → tensor of a safetensors file, or of one that torch pickled; each holds plain numbers (`plain.py`). Raises
    ExportError with one line."""
    tensors = _read_safetensors(path) if path.suffix == ".safetensors" else load_pickled(path)
    for name, value in tensors.items():
        if problem := plain_problem(value):
            raise ExportError(f"{path}: {name:.80} {problem}; save it in float32, float16 or bfloat16")
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:
        raise_if_foreign(error)
        raise ExportError(f"{path} cannot be read: {first_line(error)}") from error
