"""Clean-up of a freshly traced graph: few nodes, no shape arithmetic, weights in the layout MatMul reads.

Parameters are lifted to graph inputs first, so constant folding can never bake a (hollow) weight in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    IdentityEliminationPass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
)
from onnxscript import optimizer

from .hooks import OPSET
from .merge_heads import merge_heads


@dataclass(frozen=True)
class WeightSource:
    """A stored tensor: parameters (names inside the module) joined on their output dimension, perhaps transposed.

    `shape` and `dtype` are those of the stored tensor. Joined parameters are [out_i, in] and stored as [in, sum out].
    """

    parameters: tuple[str, ...]
    transpose: bool
    shape: tuple[int, ...]
    dtype: ir.DataType


def clean(
    model: ir.Model, parameters: Collection[str], inputs: Sequence[str], *, merge_linears: bool
) -> tuple[ir.Graph, dict[str, WeightSource]]:
    """Returns the cleaned graph and the source of every weight input that it still uses."""
    graph = model.graph
    for name in [n for n in graph.initializers if n in parameters]:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
    simplify_reshapes(graph)
    optimizer.optimize(model, onnx_shape_inference=False)
    graph = model.graph
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    IdentityEliminationPass()(model)
    remove_no_ops(graph)
    weights = {
        v.name: WeightSource((v.name,), False, tuple(int(d) for d in v.shape), v.dtype)  # type: ignore[union-attr]
        for v in graph.inputs
        if v.name in parameters
    }
    fold_transposes(graph, weights)  # type: ignore[arg-type]
    if merge_linears:
        merge_parallel_linears(graph, weights)  # type: ignore[arg-type]
        merge_heads(graph)  # type: ignore[arg-type]
    RemoveUnusedNodesPass()(model)
    strip_defaults(graph)
    used = {v for node in graph for v in node.inputs if v is not None} | set(graph.outputs)
    for value in list(graph.inputs):
        if value not in used and value.name not in inputs:
            graph.inputs.remove(value)
            weights.pop(value.name, None)  # type: ignore[arg-type]
    return graph, weights  # type: ignore[return-value]


def simplify_reshapes(graph: ir.Graph) -> None:
    """Rewrites Reshape targets computed from Shape chains as constants: 0 copies a dimension, one -1 infers.

    Uses the symbolic shapes that torch.export recorded, so it must run before other rewrites.
    """
    for node in graph:
        if node.op_type != "Reshape":
            continue
        source, result = node.inputs[0].shape, node.outputs[0].shape  # type: ignore[union-attr]
        if source is None or result is None:
            continue
        target: list[int] = []
        for index, dim in enumerate(result):
            if isinstance(dim, int):
                target.append(dim)
            elif index < len(source) and not isinstance(source[index], int) and source[index] == dim:
                target.append(0)
            else:
                target.append(-1)
        if target.count(-1) > 1 or any(isinstance(d, int) and d == 0 for d in result):
            continue
        constant = ir.Node(
            "", "Constant", [], [ir.AttrTensor("value", ir.tensor(np.array(target, np.int64)))], num_outputs=1
        )
        constant.outputs[0].name = f"{node.outputs[0].name}_shape"
        graph.insert_before(node, constant)
        node.replace_input_with(1, constant.outputs[0])
        node.attributes.pop("allowzero", None)


def _scalar(value: ir.Value | None) -> float | None:
    """The value of a one-element constant, else None."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return float(value.const_value.numpy().reshape(()))


_NEUTRAL = {"Mul": 1.0, "Add": 0.0}
"""Operator → the operand that changes nothing."""


def remove_no_ops(graph: ir.Graph) -> None:
    """Removes Cast to the same type, multiplication by one and addition of zero."""
    for node in list(graph):
        source = node.inputs[0] if node.inputs else None
        keep = source
        if node.op_type == "Cast":
            no_op = source is not None and source.dtype == ir.DataType(node.attributes["to"].as_int())
        elif node.op_type in _NEUTRAL and node.outputs[0].shape is not None:
            left, right = node.inputs
            operands = [
                (a, b) for a, b in ((left, right), (right, left)) if _scalar(b) == _NEUTRAL[node.op_type]
            ]
            keep = operands[0][0] if operands else None
            no_op = keep is not None and keep.shape == node.outputs[0].shape
        else:
            no_op = False
        if no_op and keep is not None and not (node.outputs[0].is_graph_output() and keep.producer() is None):
            if node.outputs[0].is_graph_output():
                keep.name, node.outputs[0].name = node.outputs[0].name, keep.name
            node.outputs[0].replace_all_uses_with(keep, replace_graph_outputs=True)
            graph.remove(node, safe=True)


def fold_transposes(graph: ir.Graph, weights: dict[str, WeightSource]) -> None:
    """Replaces Transpose(weight) by a weight stored transposed, when nothing reads the weight as it is."""
    by_value = {v: v.name for v in graph.inputs if v.name in weights}
    for value, name in by_value.items():
        users = [u.node for u in value.uses()]
        if not users or len(value.shape or ()) != 2 or any(u.op_type != "Transpose" for u in users):  # type: ignore[arg-type]
            continue
        source = weights[name]  # type: ignore[index]
        stored = ir.Shape(tuple(reversed(source.shape)))
        for node in users:
            node.outputs[0].replace_all_uses_with(value)
            graph.remove(node, safe=True)
        value.shape = stored
        weights[name] = WeightSource(source.parameters, True, tuple(reversed(source.shape)), source.dtype)  # type: ignore[index]


def merge_parallel_linears(graph: ir.Graph, weights: dict[str, WeightSource]) -> None:
    """Joins MatMuls of the same input with different weights into one MatMul and a Split (q, k, v; gate, up).

    One pass over a larger weight costs fewer kernel launches; the joined tensor is stored once, instead of its parts.
    Biased linears are joined when all of a group have a bias.
    """
    groups: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if node.op_type == "MatMul" and node.inputs[1] is not None and node.inputs[1].name in weights:
            source = weights[node.inputs[1].name]  # type: ignore[index]
            if source.transpose and len(node.inputs[1].uses()) == 1:
                groups.setdefault(node.inputs[0], []).append(node)  # type: ignore[arg-type]
    for left, nodes in groups.items():
        if len(nodes) < 2:
            continue
        tails = [_bias_add(n, weights) for n in nodes]
        biased = [t for t in tails if t is not None]
        if biased and len(biased) != len(nodes):
            continue
        names = [n.inputs[1].name for n in nodes]  # type: ignore[union-attr]
        parts = [weights[n] for n in names]  # type: ignore[index]
        widths = [p.shape[1] for p in parts]
        joined = _add_weight(graph, weights, parts, (parts[0].shape[0], sum(widths)), transpose=True)
        matmul = ir.Node("", "MatMul", [left, joined], num_outputs=1)
        matmul.outputs[0].name = f"{joined.name}_rows"
        anchor, made, wide = nodes[0], [matmul], matmul.outputs[0]
        if biased:
            biases = [weights[bias.name] for _, bias in biased]  # type: ignore[index]
            bias = _add_weight(graph, weights, biases, (sum(widths),), transpose=False)
            add = ir.Node("", "Add", [wide, bias], num_outputs=1)
            add.outputs[0].name = f"{bias.name}_rows"
            made.append(add)
            wide = add.outputs[0]
        sizes = ir.Value(name=f"{joined.name}_sizes", const_value=ir.tensor(np.array(widths, np.int64)))
        sizes.shape, sizes.type = ir.Shape([len(widths)]), ir.TensorType(ir.DataType.INT64)
        graph.initializers[sizes.name] = sizes  # type: ignore[index]
        split = ir.Node("", "Split", [wide, sizes], [ir.AttrInt64("axis", -1)], num_outputs=len(nodes))
        made.append(split)
        graph.insert_before(anchor, made)
        for node, tail, output in zip(nodes, tails, split.outputs, strict=True):
            last = node if tail is None else tail[0]
            output.name = f"{last.outputs[0].name}_part"
            output.shape, output.type = last.outputs[0].shape, last.outputs[0].type
            last.outputs[0].replace_all_uses_with(output, replace_graph_outputs=True)
            for dead in [node] if tail is None else [tail[0], node]:
                graph.remove(dead, safe=True)


def _bias_add(node: ir.Node, weights: dict[str, WeightSource]) -> tuple[ir.Node, ir.Value] | None:
    users = [u.node for u in node.outputs[0].uses()]
    if len(users) != 1 or users[0].op_type != "Add":
        return None
    for value in users[0].inputs:
        if value is not None and value.name in weights and len(weights[value.name].shape) == 1:
            return users[0], value
    return None


def _add_weight(
    graph: ir.Graph,
    weights: dict[str, WeightSource],
    parts: Sequence[WeightSource],
    shape: tuple[int, ...],
    *,
    transpose: bool,
) -> ir.Value:
    source = WeightSource(
        tuple(p for part in parts for p in part.parameters), transpose, shape, parts[0].dtype
    )
    value = ir.Value(
        name="+".join(source.parameters), shape=ir.Shape(shape), type=ir.TensorType(source.dtype)
    )
    graph.inputs.append(value)
    weights[value.name] = source  # type: ignore[index]
    return value


def strip_defaults(graph: ir.Graph) -> None:
    """Drops attributes that have the operator's default value (the tracer writes them all, `is_causal=0` among them)."""
    for node in graph:
        schema = onnx.defs.get_schema(node.op_type, OPSET, node.domain)
        for name, attribute in list(node.attributes.items()):
            default = schema.attributes[name].default_value if name in schema.attributes else None
            if (
                default is not None
                and default.name
                and onnx.helper.get_attribute_value(default) == _plain(attribute)
            ):
                del node.attributes[name]


def _plain(attribute: ir.Attr) -> object:
    value = attribute.value
    return value.encode() if isinstance(value, str) else value
