"""The `commit` graph: keeps the accepted entries of a token tree, contiguous, in every layer's caches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ...runtime.graphs.values import CachedLayers, caches_by_name
from .composer import Composer
from .weights import WeightStore


def build_commit(store: WeightStore, layers: Sequence[int], shape: CachedLayers) -> ir.Model:
    """`source_rows` [batch, width] cache slots are gathered, then written at `write_indices` [batch].

    Gathering reads before the write of the same layer, so caches may be updated in place.
    """
    graph = Composer("commit", store, "commit")
    source, write = graph.input("source_rows"), graph.input("write_indices")
    kept = [
        (name.removesuffix("_cache"), i, own, graph.input(f"{name}.{i}"))
        for name, by_layer in caches_by_name(shape, layers).items()
        for i, own in by_layer.items()
    ]
    index = graph.node("Unsqueeze", [source, graph.constant(np.array([1, 3], np.int64))], "index")
    slots: dict[tuple[int, int], ir.Value] = {}
    for _, _, (heads, size), _ in kept:
        if (heads, size) not in slots:
            every = graph.constant(np.array([1, heads, 1, size], np.int64))
            node = "slots" if not slots else f"slots_{heads}x{size}"
            slots[heads, size] = graph.node("Expand", [index, every], node)
    for kind, i, own, cache in kept:
        taken = graph.node("GatherElements", [cache, slots[own]], f"{kind}.{i}/taken", axis=2)
        updated = graph.node(
            "TensorScatter", [cache, taken, write], f"{kind}.{i}/kept", axis=2, mode="linear"
        )
        graph.output(f"updated_{kind}_cache.{i}", updated)
    return graph.model()
