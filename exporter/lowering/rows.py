"""New cache entries as outputs: a graph reads the caches, and who runs it appends what it computed.

`TensorScatter` into `key_cache.i` goes; the entries that it would have written, `new_key.i` and `new_value.i` [batch,
kv_heads, width, head_dim], are outputs in place of the updated cache, and attention is over the cache and the new entries
side by side. Its mask comes in two parts: `attn_mask` [batch, heads, width, cache] must hide every slot from the first
new entry on, `new_mask` [batch, heads, width, width] is its block over the new entries. So do `sliding_mask` and
`new_sliding_mask`. A convolution, which gathers rows by their slots, takes those from `write_indices` on from the new
entries; only such a graph still has that input.
"""

from __future__ import annotations

import onnx_ir as ir

from ...runtime.common.errors import ExportError
from ...runtime.engines.kv_append import NEW_MASKS, START, new_name
from .attention import Attentions, Rows
from .rewriter import Rewriter, given, number_of, refuse_attributes


def output_rows(graph: ir.Graph, write: Rewriter, attentions: Attentions) -> None:
    """Rewrites every cache update of `graph`, in place, and the attentions and gathers that read one. Raises ExportError
    where an updated cache is read by anything else."""
    updates = {node.outputs[0]: node for node in graph if node.op_type == "TensorScatter"}
    for node in updates.values():
        _check_update(node)
    for node in list(graph):
        if node.op_type == "Attention" and given(node, 1) in updates:
            attentions.replace(node, _parts(graph, node, updates))
        elif node.op_type == "GatherElements" and given(node, 0) in updates:
            _take_rows(write, node, updates[given(node, 0)])
    for cache, node in updates.items():
        readers = [use.node.op_type for use in cache.uses()]
        if readers:
            raise ExportError(f"{readers[0]} reads the updated cache {cache.name!r}; it cannot be lowered")
        _hand_out(graph, write, node)
    for value in [value for value in graph.inputs if value.name == START and not value.uses()]:
        graph.inputs.remove(value)


def _check_update(node: ir.Node) -> None:
    refuse_attributes(node, ("axis", "mode"))
    mode = node.attributes.get("mode")
    start = given(node, 2)
    linear = mode is None or mode.as_string() == "linear"
    if not (linear and number_of(node, "axis", -2) in (2, -2) and start.name == START):
        raise ExportError(f"TensorScatter {node.name!r} is of another kind than the exporter makes")
    if not given(node, 0).is_graph_input() or not node.outputs[0].is_graph_output():
        raise ExportError(f"TensorScatter {node.name!r} does not update a cache of the interface")


def _parts(graph: ir.Graph, node: ir.Node, updates: dict[ir.Value, ir.Node]) -> list[Rows]:
    keys, values, mask = updates[given(node, 1)], updates.get(given(node, 2)), given(node, 3)
    new_mask = NEW_MASKS.get(mask.name or "")
    if values is None or new_mask is None or not mask.is_graph_input():
        raise ExportError(
            f"Attention {node.name!r} does not see an updated cache through {' or '.join(NEW_MASKS)}"
        )
    own = next((value for value in graph.inputs if value.name == new_mask), None)
    if own is None:
        assert mask.shape is not None and mask.type is not None
        own = ir.Value(name=new_mask, shape=ir.Shape([*mask.shape[:3], mask.shape[2]]), type=mask.type)
        graph.inputs.insert(list(graph.inputs).index(mask) + 1, own)
    return [Rows(given(keys, 0), given(values, 0), mask), Rows(given(keys, 1), given(values, 1), own)]


def _take_rows(write: Rewriter, node: ir.Node, update: ir.Node) -> None:
    """Rows by their slots: those that the update would have written are among its entries, the others in the cache."""
    refuse_attributes(node, ("axis",))
    if number_of(node, "axis", 0) != 2:
        raise ExportError(f"GatherElements {node.name!r} takes no rows of a cache; it cannot be lowered")
    write.before(node)
    cache, new, start, slots = (given(update, 0), given(update, 1), given(update, 2), given(node, 1))
    place = write.add("Sub", slots, write.add("Unsqueeze", start, write.integers(1, 2, 3)))
    width = write.add("Shape", new, dtype=ir.DataType.INT64, start=2, end=3)
    last = write.add("Sub", width, write.integers(1))
    inside = write.add("Min", write.add("Max", place, write.integers(0)), last)
    taken = write.add("GatherElements", new, inside, axis=2)
    kept = write.add("GatherElements", cache, slots, axis=2)
    is_old = write.add("Less", place, write.integers(0), dtype=ir.DataType.BOOL)
    write.replace(node, write.add("Where", is_old, kept, taken, dtype=new.dtype))


def _hand_out(graph: ir.Graph, write: Rewriter, node: ir.Node) -> None:
    """The entries of an update as an output in its place."""
    old, update = node.outputs[0], given(node, 1)
    name = new_name(old.name or "")
    if update.is_graph_input() or update.is_graph_output():
        write.before(node)
        update = write.add("Identity", update)
    assert old.shape is not None
    update.name, update.shape = name, ir.Shape([*old.shape[:2], "width", old.shape[3]])
    graph.outputs[graph.outputs.index(old)] = update
    graph.remove(node, safe=True)
