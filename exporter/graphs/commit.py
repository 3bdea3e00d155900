"""The `commit` graph: keeps the accepted entries of a token tree, contiguous, in every layer's cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .composer import Composer
from .weights import WeightStore


def build_commit(store: WeightStore, layers: Sequence[int], kv_heads: int, head_dim: int) -> ir.Model:
    """`source_rows` [batch, width] cache slots are gathered, then written at `write_indices` [batch].

    Gathering reads before the write of the same layer, so caches may be updated in place.
    """
    graph = Composer("commit", store, "commit")
    source, write = graph.input("source_rows"), graph.input("write_indices")
    caches = [(kind, i, graph.input(f"{kind}_cache.{i}")) for kind in ("key", "value") for i in layers]
    index = graph.node("Unsqueeze", [source, graph.constant(np.array([1, 3], np.int64))], "index")
    index = graph.node(
        "Expand", [index, graph.constant(np.array([1, kv_heads, 1, head_dim], np.int64))], "slots"
    )
    for kind, i, cache in caches:
        taken = graph.node("GatherElements", [cache, index], f"{kind}.{i}/taken", axis=2)
        updated = graph.node(
            "TensorScatter", [cache, taken, write], f"{kind}.{i}/kept", axis=2, mode="linear"
        )
        graph.output(f"updated_{kind}_cache.{i}", updated)
    return graph.model()
