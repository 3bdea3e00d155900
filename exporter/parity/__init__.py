"""Parity: every graph of a bundle, and a whole generation, against transformers' own modules in PyTorch.

The reference is the model class that transformers ships, loaded from the checkpoint, with eager attention and no hook
of ours. Tolerance: for each graph, the largest absolute difference divided by the largest absolute reference value
(at least 1) must stay below `LIMIT`; caches moved by `commit` must be bit-equal; a generation must have equal tokens,
but for a proven near-tie (top-2 margin of the reference below `NEAR_TIE`).
"""

from .check import check_parity
from .compare import LIMIT, ParityRow
from .generation import NEAR_TIE, compare_generation

__all__ = ["LIMIT", "NEAR_TIE", "ParityRow", "check_parity", "compare_generation"]
