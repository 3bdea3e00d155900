"""Small files of tensors, which are read whole: adapters, and drafts as others publish them. Nothing in them is trusted: pickled
tensors are read with `weights_only=True`."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from ...runtime.errors import ExportError


def read_weights(path: Path) -> dict[str, Tensor]:
    """Name → tensor of a safetensors file, or of one that torch pickled. Raises ExportError with one line."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (
        SafetensorError,
        OSError,
        EOFError,
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        KeyError,
    ) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ExportError(f"{path} cannot be read: {reason:.200}") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ExportError(f"{path} is not a mapping of names to tensors")
    return {str(name): value for name, value in found.items()}
