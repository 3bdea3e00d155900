"""Decoder segments: the same frame of inputs and outputs for every family (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ..graphs.compose import Composer
from ..graphs.template import Template
from ..graphs.weights import WeightStore
from .base import DecoderShape, GraphSpec


def build_segment(
    store: WeightStore,
    index: int,
    first: int,
    last: int,
    shape: DecoderShape,
    layer: Callable[[int], tuple[Template, Callable[[str], str]]],
    prologue: Template | None = None,
) -> GraphSpec:
    """One segment [first, last). `layer(i)` gives a layer's template and its checkpoint names; `prologue` computes
    from `positions` what all layers of the segment share (rotary angles)."""
    graph = Composer(f"segment.{index}", store)
    hidden_shape = ("batch", "width", shape.hidden_size)
    hidden = graph.input("hidden", "float32", hidden_shape)
    shared: dict[str, ir.Value] = {}
    if shape.position == "rotary":
        positions = graph.input("positions", "int64", ("batch", "width"))
        assert prologue is not None
        shared.update(graph.call(prologue, "rotary", {"positions": positions}, str))
    shared["write_indices"] = graph.input("write_indices", "int64", ("batch",))
    shared["attn_mask"] = graph.input(
        "attn_mask", shape.mask_dtype, ("batch", shape.mask_heads, "width", "cache")
    )
    cache_shape = ("batch", shape.num_kv_heads, "cache", shape.head_dim)
    layers = range(first, last)
    per_layer: dict[str, dict[int, ir.Value]] = {}
    for kind in ("key", "value"):
        per_layer[f"{kind}_cache"] = {
            i: graph.input(f"{kind}_cache.{i}", "float32", cache_shape) for i in layers
        }
    if shape.cross_attention:
        shared["cross_mask"] = graph.input("cross_mask", "bool", ("batch", 1, "width", "source"))
        cross_shape = ("batch", shape.num_heads, "source", shape.head_dim)
        for kind in ("key", "value"):
            per_layer[f"cross_{kind}"] = {
                i: graph.input(f"cross_{kind}.{i}", "float32", cross_shape) for i in layers
            }
    updated: dict[str, dict[int, ir.Value]] = {"key_cache": {}, "value_cache": {}}
    for i in layers:
        template, names = layer(i)
        inputs = {"hidden": hidden, **shared, **{kind: values[i] for kind, values in per_layer.items()}}
        result = graph.call(template, f"layer.{i}", inputs, names)
        hidden = result["hidden_out"]
        for kind, values in updated.items():
            values[i] = result[f"updated_{kind}"]
    graph.output("hidden_out", hidden, "float32", hidden_shape)
    for kind, values in updated.items():
        for i, value in values.items():
            graph.output(f"updated_{kind}.{i}", value, "float32", cache_shape)
    return GraphSpec(f"segment.{index}", "segment", graph.model(), (first, last))
