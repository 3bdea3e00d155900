"""`--weights`: the target's matrices become integers while they are read, and the manifest says so."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.bundle.target_weights import TargetWeights
from ...runtime.common.errors import OptionError
from ..families.common.matrices import quantized_matrices
from ..quantization.choice import parse_weights
from ..quantization.rounded import RoundedTensors

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..families.common.base import Family

ROUNDING = "rounding"
"""The method of a build's own integers."""


def round_weights(
    checkpoint: Checkpoint, family: Family, weights: str | None, block: int, folder: Path | None = None
) -> None:
    """Lets the matrices of `checkpoint` that `weights` names be read as integers. `folder` is where those wait that were
    rounded. OptionError for a checkpoint that is quantized already, and as `quantized_matrices`."""
    if weights is None:
        return
    if getattr(checkpoint.tensors, "quantized", None):
        raise OptionError(
            f"--weights {weights}: the weights of {checkpoint.source} are integers already; leave it out"
        )
    matrices = quantized_matrices(family.language, parse_weights(weights), block)
    if matrices:
        checkpoint.tensors = RoundedTensors(checkpoint.tensors, matrices, folder)  # type: ignore[assignment]


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
        method=ROUNDING if weights is not None else str(getattr(checkpoint.tensors, "method", "published")),
        choice=weights,
    )
