"""Parity: every graph of a bundle, and a whole generation, against transformers' own modules in PyTorch.

The reference is the model class that transformers ships, loaded from the checkpoint, with eager attention and no hook
of ours. Tolerance: every graph is given what its part of the model was given, and that part runs in float64 as well; the
graph's largest difference from float64 may be `SHARE` times that of PyTorch's own float32, and `FLOOR` of the largest
value; caches moved by `commit` must be bit-equal; a generation must have equal tokens,
but for a proven near-tie (top-2 margin of the reference below `NEAR_TIE`).
"""

from .check import check_parity
from .generation import NEAR_TIE, compare_generation
from .tally import FLOOR, SHARE, ParityRow

__all__ = ["FLOOR", "NEAR_TIE", "SHARE", "ParityRow", "check_parity", "compare_generation"]
