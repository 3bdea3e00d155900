"""What a GPU says of logits without handing them over: the best token of each, and whether it is a number.

`argmax.onnx` is a graph of this engine's, behind a bundle's `head`; `exporter/graphs/argmax.py` wrote it. It takes
`logits` float32 [num_logits, vocabulary] and `places` float32 [vocabulary].
"""

from __future__ import annotations

import numpy as np

from ..bundle.manifest import GraphInfo, ValueInfo

FILE = "argmax.onnx"
"""Beside this file."""

ANSWERS = {"best": "int64", "finite": "bool"}
"""Outputs [num_logits], and their types."""


def answers(head: GraphInfo) -> GraphInfo:
    """The interface of a head that offers both."""
    more = [ValueInfo(name=name, dtype=dtype, shape=["rows"]) for name, dtype in ANSWERS.items()]
    return GraphInfo(
        file=head.file, role=head.role, inputs=head.inputs, outputs=[*head.outputs, *more], layers=head.layers
    )


def places(vocabulary: int) -> np.ndarray:
    """float32 [vocabulary]: 0, −1, −2, …, of which the largest is that of the first token. Raises `ValueError` for more
    tokens than float32 counts."""
    if vocabulary > 1 << 24:
        raise ValueError(f"{vocabulary} tokens are more than float32 counts (16,777,216)")
    return -np.arange(vocabulary, dtype=np.float32)
