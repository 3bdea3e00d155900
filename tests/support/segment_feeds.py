"""Made-up inputs of a segment, for comparing two forms of it with each other."""

from __future__ import annotations

import numpy as np
from vlmexport.runtime.bundle.manifest import GraphInfo


def segment_feeds(graph: GraphInfo, capacity: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Floats are normal numbers, everything else is ones: three tokens of one sequence over a cache of `capacity`, all of which
    they see."""
    sizes = {
        "batch": 1, "width": 3, "cache": capacity, "span": capacity, "rows": 2, "distances": capacity + 1,
    }  # fmt: skip
    feeds: dict[str, np.ndarray] = {}
    for value in graph.inputs:
        shape = [sizes[d] if isinstance(d, str) else d for d in value.shape]
        floats = value.dtype == "float32"
        feeds[value.name] = (
            rng.standard_normal(shape).astype(np.float32) if floats else np.ones(shape, value.dtype)
        )
    return feeds
