"""What a manifest says of a target of integers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ...runtime.bundle.target_weights import TargetWeights
from ...runtime.common.bounded_files import read_json
from ...runtime.common.errors import ExportError

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..families.common.base import Family

ROUNDING = "rounding"
"""The method of a build's own integers."""

REPORT = "quantization.json"
"""The report of `vlmexport quantize` beside the weights that it wrote."""

LONGEST = 16 << 20
"""Bytes of it."""


def describe_target_weights(
    checkpoint: Checkpoint, family: Family, weights: str | None
) -> TargetWeights | None:
    """The manifest's `target_weights`; None for a target of floats."""
    matrices = checkpoint.tensors.quantized
    if not matrices:
        return None
    head = matrices.get(family.language.head.names[0])
    told = _report(checkpoint)
    layers = Counter(kind.dtype for kind in matrices.values() if kind is not head) or Counter(
        kind.dtype for kind in matrices.values()
    )
    return TargetWeights(
        dtype=layers.most_common(1)[0][0],
        block=max(kind.block for kind in matrices.values()),
        head=None if head is None else head.dtype,
        method=str(told.get("method") or _method(checkpoint))[:40],
        choice=weights,
        quality=told.get("quality"),
    )


def _method(checkpoint: Checkpoint) -> str:
    return ROUNDING if checkpoint.layout is None else checkpoint.layout.identity.partition("|")[0]


def _report(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `vlmexport quantize` measured when it wrote this checkpoint; empty for any other."""
    path = checkpoint.folder / REPORT
    if checkpoint.quantized_from is None or not path.is_file():
        return {}
    document = read_json(path, LONGEST, ExportError)
    quality = document.get("quality") if isinstance(document, dict) else None
    if not isinstance(quality, dict | None):
        raise ExportError(f"{path} is no report of `vlmexport quantize`; delete it")
    return document if isinstance(document, dict) else {}
