"""The frames of decoder graphs: the same inputs and outputs for every language model (docs/reference/graph-interfaces.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
import torch

from ....runtime.graphs.states import (
    COUNTS,
    RECENT_ROWS,
    RECURRENT_STATE,
    STATES,
    linear_layers,
    state_shapes,
)
from ....runtime.graphs.values import (
    CONV_CACHE,
    CONV_SLOTS,
    FULL,
    MASKS,
    caches_by_name,
    deepstack_inputs,
    kind_of_layer,
    layer_caches,
    mask_of_layer,
)
from ...graphs.composer import Composer
from ...graphs.traced_module import Template, TraceInput
from ...graphs.weights import WeightRef, WeightStore
from .parts import DecoderShape, GraphSpec

Named = Callable[[str], str]
"""A parameter of a traced module → the checkpoint's tensor."""

Prologue = tuple[Template, Named]
"""Computed from `positions` at the start of a segment: `cos` and `sin` that its layers share, or `hidden_out`, the hidden states
with a learned table of positions added."""

Prologues = Mapping[str, Prologue]
"""By kind of layer (a key of `MASKS`): layers of a kind that has none share that of `FULL`."""


def layer_inputs(shape: DecoderShape, layer: int, angles: int | None = None) -> list[TraceInput]:
    """What a decoder layer takes while it is traced, in this order; one that is no attention takes neither mask nor
    angles. `angles` of a head: by default half its size."""
    dtype = torch.bool if shape.mask_dtype == "bool" else torch.float32
    attends, caches = mask_of_layer(shape.layer_types, layer) is not None, layer_caches(shape, layer)
    inputs = [TraceInput("hidden", ("batch", "width", shape.hidden_size))]
    if attends and shape.position in ("rotary", "mrope"):
        size = shape.head_dim // 2 if angles is None else angles
        inputs += [TraceInput(name, ("batch", "width", size)) for name in ("cos", "sin")]
    if caches:
        inputs.append(TraceInput("write_indices", ("batch",), torch.int64))
    if attends:
        inputs.append(TraceInput("attn_mask", ("batch", shape.mask_heads, "width", "cache"), dtype))
    if CONV_CACHE in caches:
        assert shape.conv_kernel is not None, "of a shape with convolutions"
        inputs.append(TraceInput(CONV_SLOTS, ("batch", "width", shape.conv_kernel - 1), torch.int64))
    inputs += [TraceInput(name, ("batch", heads, "cache", size)) for name, (heads, size) in caches.items()]
    inputs += state_trace_inputs(shape, layer)
    if shape.cross_attention:
        cross = ("batch", shape.num_heads, "source", shape.head_dim)
        inputs.append(TraceInput("cross_mask", ("batch", 1, "width", "source"), torch.bool))
        inputs += [TraceInput(name, cross) for name in ("cross_key", "cross_value")]
    return inputs


def layer_outputs(shape: DecoderShape, layer: int) -> tuple[str, ...]:
    """What a decoder layer gives while it is traced, in this order."""
    kept = (*layer_caches(shape, layer), *(STATES if linear_layers(shape.layer_types, [layer]) else ()))
    return ("hidden_out", *(f"updated_{name}" for name in kept))


def state_trace_inputs(shape: DecoderShape, layer: int) -> list[TraceInput]:
    """Of a layer with linear attention: its state, and what it is told of it. A trace serves any number of recent rows."""
    if not linear_layers(shape.layer_types, [layer]):
        return []
    assert shape.linear_attention is not None, "of a shape with linear attention"
    sizes = state_shapes(shape.linear_attention, 0)
    return [
        *(TraceInput(name, ("batch",), torch.int64) for name in COUNTS),
        TraceInput(RECENT_ROWS, ("batch", "recent", sizes[RECENT_ROWS][1])),
        TraceInput(RECURRENT_STATE, ("batch", *sizes[RECURRENT_STATE])),
    ]


def build_segment(
    store: WeightStore,
    index: int,
    first: int,
    last: int,
    shape: DecoderShape,
    layer: Callable[[int], tuple[Template, Named]],
    prologues: Prologues = MappingProxyType({}),
) -> GraphSpec:
    """One segment [first, last). `layer(i)` gives a layer's template and its checkpoint names; `prologues` are computed
    from `positions` in every segment that takes them (`positions_shape`)."""
    graph = Composer(f"segment.{index}", store, "segment", (first, last))
    _compose_layers(graph, shape, range(first, last), range(first, last), layer, prologues)
    return GraphSpec(f"segment.{index}", "segment", graph.model(), (first, last))


def build_skipped(
    store: WeightStore,
    shape: DecoderShape,
    layer: Callable[[int], tuple[Template, Named] | None],
    attention: Sequence[int],
    prologues: Prologues = MappingProxyType({}),
) -> GraphSpec:
    """The graph `skipped`: what is left of all layers where sublayers are left out. `layer(i)` is as of a segment, None
    where nothing is left; a template without attention takes `hidden` alone. `attention` are the layers that attend."""
    graph = Composer("skipped", store, "skipped")
    _compose_layers(graph, shape, range(shape.num_layers), attention, layer, prologues)
    return GraphSpec("skipped", "skipped", graph.model())


def _compose_layers(
    graph: Composer,
    shape: DecoderShape,
    layers: Sequence[int],
    attention: Sequence[int],
    layer: Callable[[int], tuple[Template, Named] | None],
    prologues: Prologues,
) -> None:
    """Inputs, nodes and outputs of `layers` one after the other; those of `attention` have their caches."""
    hidden = graph.input("hidden")
    shared: dict[str, ir.Value] = {}
    angles: dict[str, dict[str, ir.Value]] = {}
    kinds = {kind_of_layer(shape.layer_types, i) for i in attention}
    if graph.takes("positions"):
        assert prologues, f"position kind {shape.position!r} needs a prologue"
        given = {"hidden": hidden, "positions": graph.input("positions")}
        for kind, (template, names) in prologues.items():
            if kind in kinds or len(prologues) == 1:
                prefix = "positions" if kind == FULL else f"{kind}/positions"
                angles[kind] = graph.call(template, prefix, {n: given[n] for n in template.inputs}, names)
                hidden = angles[kind].pop("hidden_out", hidden)
    told = {name: graph.input(name) for name in ("write_indices", *COUNTS) if graph.takes(name)}
    masks = {name: graph.input(name) for name in MASKS.values() if graph.takes(name)}
    slots = {name: graph.input(name) for name in (CONV_SLOTS,) if graph.takes(name)}
    caches = caches_by_name(shape, attention)
    cached: dict[str, Iterable[int]] = {**caches}
    if shape.cross_attention:
        shared["cross_mask"] = graph.input("cross_mask")
        cached |= dict.fromkeys(("cross_key", "cross_value"), attention)
    per_layer = {name: {i: graph.input(f"{name}.{i}") for i in own} for name, own in cached.items()}
    deepstack = {name: graph.input(name) for name in deepstack_inputs(shape.deepstack_layers, layers)}
    own = linear_layers(shape.layer_types, attention)
    per_layer |= {name: {i: graph.input(f"{name}.{i}") for i in own} for name in STATES if own}
    kept = [*caches, *(STATES if own else ())]
    updated: dict[str, dict[int, ir.Value]] = {name: {} for name in kept}
    for i in layers:
        piece = layer(i)
        if piece is not None:
            template, names = piece
            inputs = {"hidden": hidden, **shared}
            if i in attention:
                kind = kind_of_layer(shape.layer_types, i)
                inputs |= slots | told
                if kind in MASKS:
                    inputs["attn_mask"] = masks[MASKS[kind]]
                    inputs |= angles.get(kind) or angles.get(FULL, {})
            inputs |= {name: values[i] for name, values in per_layer.items() if i in values}
            result = graph.call(template, f"layer.{i}", inputs, names)
            hidden = result["hidden_out"]
            for name, values in updated.items():
                if i in per_layer[name]:
                    values[i] = result[f"updated_{name}"]
        if f"deepstack.{i}" in deepstack:  # of a layer that is left out, too
            hidden = graph.node("Add", [hidden, deepstack[f"deepstack.{i}"]], f"layer.{i}/deepstack")
    graph.output("hidden_out", hidden)
    for kind, values in updated.items():
        for i, value in values.items():
            graph.output(f"updated_{kind}.{i}", value)


def build_cross_kv(
    store: WeightStore, shape: DecoderShape, layer: Callable[[int], tuple[Template, Named]]
) -> GraphSpec:
    """The `cross_kv` graph: keys and values of every layer's cross-attention over the source.

    A template of `layer(i)` takes `encoder_states` [batch, source, E] and gives `key` and `value`.
    """
    graph = Composer("cross_kv", store, "cross_kv")
    states = graph.input("encoder_states")
    results = []
    for i in range(shape.num_layers):
        template, names = layer(i)
        results.append(graph.call(template, f"layer.{i}", {"encoder_states": states}, names))
    for kind in ("key", "value"):
        for i, result in enumerate(results):
            graph.output(f"cross_{kind}.{i}", result[kind])
    return GraphSpec("cross_kv", "cross_kv", graph.model())


def build_embed(store: WeightStore, scale: float | None = None) -> GraphSpec:
    """The `embed` graph; the table is an input as it is stored, bound from the weights file."""
    graph = Composer("embed", store, "embed")
    graph.output("hidden", embeddings(graph, scale=scale))
    return GraphSpec("embed", "embed", graph.model())


def embeddings(graph: Composer, ids: str = "token_ids", scale: float | None = None) -> ir.Value:
    """Declares the inputs `ids` and `embedding_table`, with scales where it consists of integers; the embeddings
    [batch, width, E] of the ids, times `scale`."""
    embeds = _rows_of_table(graph, ids)
    if scale is None:
        return embeds
    return graph.node("Mul", [embeds, graph.constant(np.array(scale, np.float32))], "scaled_rows")


def _rows_of_table(graph: Composer, ids: str) -> ir.Value:
    tokens, table = graph.input(ids), graph.input("embedding_table")
    if graph.takes("embedding_scales"):
        return _dequantized(graph, tokens, table, graph.input("embedding_scales"))
    embeds = graph.node("Gather", [table, tokens], "gather", axis=0)
    return (
        embeds
        if table.dtype == ir.DataType.FLOAT
        else graph.node("Cast", [embeds], "widened", to=ir.DataType.FLOAT)
    )


def _dequantized(graph: Composer, tokens: ir.Value, table: ir.Value, scales: ir.Value) -> ir.Value:
    """The columns `tokens` [batch, width] of integers [E, V] times their scales [E / block, V], as rows. No
    `DequantizeLinear`: of what is no weight, engines dequantise whole tensors or none."""
    last = [1, 2, 0]
    assert table.shape is not None and scales.shape is not None
    size, blocks = table.shape[0], scales.shape[0]
    assert isinstance(size, int) and isinstance(blocks, int)

    def columns(of: ir.Value, name: str) -> ir.Value:
        part = graph.node("Gather", [of, tokens], f"gather_{name}", axis=1)
        if of.dtype != ir.DataType.FLOAT:
            part = graph.node("Cast", [part], f"widened_{name}", to=ir.DataType.FLOAT)
        return graph.node("Transpose", [part], f"rows_{name}", perm=last)

    def integers(*values: int) -> ir.Value:
        return graph.constant(np.array(values, np.int64))

    numbers = graph.node("Reshape", [columns(table, "integers"), integers(0, 0, blocks, -1)], "blocks")
    own = graph.node("Unsqueeze", [columns(scales, "scales"), integers(-1)], "scales_by_block")
    return graph.node(
        "Reshape", [graph.node("Mul", [numbers, own], "scaled"), integers(0, 0, size)], "embeds"
    )


@dataclass(frozen=True)
class FinalNorm:
    """What stands between the last layer's hidden states [.., `width`] and the LM head: a norm, and in some models a scale."""

    template: Template
    names: Named
    width: int
    scale: float = 1.0

    def hidden_states(self, graph: Composer) -> ir.Value:
        """Declares the inputs `hidden` and `row_index`; the hidden states that those select, [rows, width], normalised."""
        hidden, index = graph.input("hidden"), graph.input("row_index")
        flat = graph.node("Reshape", [hidden, graph.constant(np.array([-1, self.width], np.int64))], "flat")
        return self.applied(graph, graph.node("Gather", [flat, index], "rows", axis=0))

    def applied(self, graph: Composer, hidden_states: ir.Value) -> ir.Value:
        """`hidden_states` [.., width], normalised and scaled."""
        normed = graph.call(self.template, "norm", {"hidden": hidden_states}, self.names)["hidden_out"]
        if self.scale == 1.0:
            return normed
        return graph.node("Mul", [normed, graph.constant(np.array(self.scale, np.float32))], "scale")


def build_head(store: WeightStore, norm: FinalNorm, table: WeightRef, cap: float | None = None) -> GraphSpec:
    """The `head` graph: hidden states are selected, normalised, perhaps scaled, and multiplied by the table [V, E]; logits x
    become cap · tanh(x / cap) where there is a `cap`."""
    graph = Composer("head", store, "head")
    logits = graph.product(norm.hidden_states(graph), table, "logits_gemm")
    if cap is not None:
        most = graph.constant(np.array(cap, np.float32))
        bounded = graph.node("Tanh", [graph.node("Div", [logits, most], "logits_of_cap")], "logits_tanh")
        logits = graph.node("Mul", [bounded, most], "capped_logits")
    graph.output("logits", logits)
    return GraphSpec("head", "head", graph.model())
