"""The identity of trained weights: a draft is trained for exactly one."""

from __future__ import annotations

import hashlib

import torch

from ..quantization.rounded import RoundedTensors
from .changed import ChangedTensors
from .checkpoint import Checkpoint
from .integer_tensors import IntegerTensors
from .merging import MergedTensors
from .tensors import TensorFiles


def fingerprint(checkpoint: Checkpoint | TensorFiles | ChangedTensors | RoundedTensors) -> str:
    """`sha256:<hex>` over name, dtype, shape and content of every tensor, sorted by name.

    The same for one file or many shards. Reads every tensor once, one at a time; computed once per checkpoint object.
    With an adapter it is that of the model without and the adapter's, in one. Where a build rounds matrices it is that of
    the model before. Of a quantized checkpoint the stored tensors are read, and what its configuration says of them counts,
    too.
    """
    files = checkpoint.tensors if isinstance(checkpoint, Checkpoint) else checkpoint
    if isinstance(files, RoundedTensors):
        return fingerprint(files.base)
    cached = getattr(files, "_fingerprint", None)
    if cached is not None:
        return cached
    if isinstance(files, MergedTensors):
        files._fingerprint = files.identity(fingerprint(files.base))  # type: ignore[attr-defined]
        return files._fingerprint  # type: ignore[attr-defined]
    digest = hashlib.sha256()
    stored = files
    if isinstance(files, IntegerTensors):
        digest.update(f"layout|{files.identity}|".encode())
        stored = files.files
    for name in stored:
        digest.update(f"{name}|{stored.dtype(name)}|{','.join(map(str, stored.shape(name)))}|".encode())
        tensor = stored.read(name).contiguous()
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    files._fingerprint = "sha256:" + digest.hexdigest()  # type: ignore[attr-defined]
    return files._fingerprint  # type: ignore[attr-defined]
