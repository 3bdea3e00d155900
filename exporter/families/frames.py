"""The frames of decoder graphs: the same inputs and outputs for every language model (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch

from ...runtime.bundle.interfaces import positions_shape
from ..graphs.compose import Composer
from ..graphs.template import Template, TraceInput
from ..graphs.weights import WeightRef, WeightStore
from .base import DecoderShape, GraphSpec

Named = Callable[[str], str]
"""A parameter of a traced module → the checkpoint's tensor."""

Prologue = tuple[Template, Named]
"""Computed from `positions` at the start of a segment: `cos` and `sin` that its layers share, or `hidden_out`, the rows
with a learned table of positions added."""


def layer_inputs(shape: DecoderShape) -> list[TraceInput]:
    """What one decoder layer of this shape takes while it is traced, in this order."""
    cache = ("batch", shape.num_kv_heads, "cache", shape.head_dim)
    dtype = torch.bool if shape.mask_dtype == "bool" else torch.float32
    inputs = [TraceInput("hidden", ("batch", "width", shape.hidden_size))]
    if shape.position in ("rotary", "mrope"):
        inputs += [TraceInput(name, ("batch", "width", shape.head_dim // 2)) for name in ("cos", "sin")]
    inputs += [
        TraceInput("write_indices", ("batch",), torch.int64),
        TraceInput("attn_mask", ("batch", shape.mask_heads, "width", "cache"), dtype),
        TraceInput("key_cache", cache),
        TraceInput("value_cache", cache),
    ]
    if shape.cross_attention:
        cross = ("batch", shape.num_heads, "source", shape.head_dim)
        inputs.append(TraceInput("cross_mask", ("batch", 1, "width", "source"), torch.bool))
        inputs += [TraceInput(name, cross) for name in ("cross_key", "cross_value")]
    return inputs


def build_segment(
    store: WeightStore,
    index: int,
    first: int,
    last: int,
    shape: DecoderShape,
    layer: Callable[[int], tuple[Template, Named]],
    prologue: Prologue | None = None,
) -> GraphSpec:
    """One segment [first, last). `layer(i)` gives a layer's template and its checkpoint names; `prologue` is computed
    from `positions` in every segment that takes them (`positions_shape`)."""
    graph = Composer(f"segment.{index}", store)
    hidden_shape = ("batch", "width", shape.hidden_size)
    hidden = graph.input("hidden", "float32", hidden_shape)
    shared: dict[str, ir.Value] = {}
    positions = positions_shape(shape.position, first)
    if positions is not None:
        assert prologue is not None, f"position kind {shape.position!r} needs a prologue"
        template, names = prologue
        given = {"hidden": hidden, "positions": graph.input("positions", "int64", positions)}
        shared = graph.call(template, "positions", {n: given[n] for n in template.inputs}, names)
        hidden = shared.pop("hidden_out", hidden)
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


def build_cross_kv(
    store: WeightStore, shape: DecoderShape, layer: Callable[[int], tuple[Template, Named]]
) -> GraphSpec:
    """The `cross_kv` graph: keys and values of every layer's cross-attention over the source rows.

    A template of `layer(i)` takes `encoder_states` [batch, source, E] and gives `key` and `value`.
    """
    graph = Composer("cross_kv", store)
    states = graph.input("encoder_states", "float32", ("batch", "source", shape.hidden_size))
    results = []
    for i in range(shape.num_layers):
        template, names = layer(i)
        results.append(graph.call(template, f"layer.{i}", {"encoder_states": states}, names))
    rows = ("batch", shape.num_heads, "source", shape.head_dim)
    for kind in ("key", "value"):
        for i, result in enumerate(results):
            graph.output(f"cross_{kind}.{i}", result[kind], "float32", rows)
    return GraphSpec("cross_kv", "cross_kv", graph.model())


def build_embed(store: WeightStore, table: WeightRef) -> GraphSpec:
    """The `embed` graph; the table is an input, bound from the weights file."""
    graph = Composer("embed", store)
    ids = graph.input("token_ids", "int64", ("batch", "width"))
    rows = graph.input("embedding_table", "float32", table.shape)
    hidden = graph.node("Gather", [rows, ids], "gather", axis=0)
    graph.output("hidden", hidden, "float32", ("batch", "width", table.shape[1]))
    return GraphSpec("embed", "embed", graph.model())


def build_head(
    store: WeightStore, norm: Template, norm_name: Named, table: WeightRef, scale: float = 1.0
) -> GraphSpec:
    """The `head` graph: rows are selected, normalised, perhaps scaled, and multiplied by the table [V, E]."""
    vocabulary, width = table.shape
    graph = Composer("head", store)
    hidden = graph.input("hidden", "float32", ("batch", "width", width))
    index = graph.input("row_index", "int64", ("rows",))
    flat = graph.node("Reshape", [hidden, graph.constant(np.array([-1, width], np.int64))], "flat")
    rows = graph.node("Gather", [flat, index], "rows", axis=0)
    normed = graph.call(norm, "norm", {"hidden": rows}, norm_name)["hidden_out"]
    if scale != 1.0:
        normed = graph.node("Mul", [normed, graph.constant(np.array(scale, np.float32))], "scale")
    logits = graph.node("Gemm", [normed, graph.weight(table)], "logits_gemm", transB=1)
    graph.output("logits", logits, "float32", ("rows", vocabulary))
    return GraphSpec("head", "head", graph.model())
