"""What a manifest says of a target of integers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...runtime.bundle.target_weights import TargetWeights

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..families.common.base import Family

ROUNDING = "rounding"
"""The method of a build's own integers."""


def describe_target_weights(
    checkpoint: Checkpoint, family: Family, weights: str | None
) -> TargetWeights | None:
    """The manifest's `target_weights`; None for a target of floats."""
    matrices = getattr(checkpoint.tensors, "quantized", {})
    if not matrices:
        return None
    head = matrices.get(family.language.head.names[0])
    layers = Counter(kind.dtype for kind in matrices.values() if kind is not head) or Counter(
        kind.dtype for kind in matrices.values()
    )
    return TargetWeights(
        dtype=layers.most_common(1)[0][0],
        block=max(kind.block for kind in matrices.values()),
        head=None if head is None else head.dtype,
        method=ROUNDING if checkpoint.layout is None else checkpoint.layout.identity.partition("|")[0],
        choice=weights,
    )
