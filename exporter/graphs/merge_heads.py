"""Queries, keys and values of one product take one Reshape and one Transpose: a pass over one token is mostly small operators.

A traced layer splits the product of merged linears first, and then reshapes, transposes and rotates each part. Here the
whole is reshaped and transposed, split by heads, and queries and keys are rotated together: of nine nodes five are left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

HEADS_FIRST = [0, 2, 1, 3]
"""[batch, width, heads, size] → [batch, heads, width, size]."""


def merge_heads(graph: ir.Graph) -> None:
    """Rewrites every `Split` whose parts all become heads of one size."""
    for node in list(graph):
        if node.op_type == "Split" and _axis(node) == -1:
            heads = [_heads(part) for part in node.outputs]
            pairs = [pair for pair in heads if pair is not None]
            if len(pairs) == len(heads) > 1 and len({_size(reshape) for reshape, _ in pairs}) == 1:
                _merge(graph, node, pairs)


def _heads(part: ir.Value) -> tuple[ir.Node, ir.Node] | None:
    """The Reshape to [0, 0, heads, size] and the Transpose that alone read `part`."""
    reshape = _only_user(part, "Reshape")
    target = None if reshape is None else _constant(reshape.inputs[1])
    if reshape is None or target is None or len(target) != 4 or target[:2] != [0, 0] or min(target[2:]) < 1:
        return None
    transpose = _only_user(reshape.outputs[0], "Transpose")
    if transpose is None or list(transpose.attributes["perm"].as_ints()) != HEADS_FIRST:
        return None
    return (reshape, transpose)


def _merge(graph: ir.Graph, split: ir.Node, heads: Sequence[tuple[ir.Node, ir.Node]]) -> None:
    whole, name = split.inputs[0], split.outputs[0].name
    counts = [_target(reshape)[2] for reshape, _ in heads]
    size = _size(heads[0][0])
    assert whole is not None
    first = heads[0][1].outputs[0]
    dims = None if first.shape is None else list(first.shape)

    def value(node: ir.Node, label: str, count: int, *, heads_first: bool = True) -> ir.Value:
        out = node.outputs[0]
        out.name, out.type = f"{name}_{label}", first.type
        if dims is not None:
            batch, width = dims[0], dims[2]
            out.shape = ir.Shape([batch, count, width, size] if heads_first else [batch, width, count, size])
        return out

    total = sum(counts)
    shape = _integers(graph, f"{name}_all_heads", [0, 0, total, size])
    reshape = ir.Node("", "Reshape", [whole, shape], num_outputs=1)
    transpose = ir.Node(
        "",
        "Transpose",
        [value(reshape, "by_position", total, heads_first=False)],
        [ir.AttrInt64s("perm", HEADS_FIRST)],
        num_outputs=1,
    )
    made = [reshape, transpose]
    parts = [transpose.outputs[0] for _, transpose in heads]
    rotated = _rotated_alike(parts)
    by_head = value(transpose, "by_head", total)
    if rotated is None:
        made.append(_split(graph, by_head, counts, parts, f"{name}_heads"))
    else:
        # Queries and keys are one part until they are rotated.
        made.append(
            _split(graph, by_head, [sum(counts[:2]), *counts[2:]], [None, *parts[2:]], f"{name}_heads")
        )
        both = value(made[-1], "unrotated", sum(counts[:2]))
        rotary = ir.Node(
            "",
            "RotaryEmbedding",
            [both, *rotated[0].inputs[1:]],
            list(rotated[0].attributes.values()),
            num_outputs=1,
        )
        made.append(rotary)
        together = value(rotary, "rotated", sum(counts[:2]))
        made.append(
            _split(graph, together, counts[:2], [node.outputs[0] for node in rotated], f"{name}_rotated")
        )
    graph.insert_after(_latest(graph, split, rotated), made)
    for node in (*(rotated or ()), *(node for pair in heads for node in reversed(pair)), split):
        graph.remove(node, safe=True)


def _latest(graph: ir.Graph, split: ir.Node, rotated: Sequence[ir.Node] | None) -> ir.Node:
    """The node behind which all inputs are there: angles may be computed after the product."""
    places = {node: place for place, node in enumerate(graph)}
    needed = [split]
    for value in rotated[0].inputs[1:] if rotated else ():
        producer = None if value is None else value.producer()
        if producer is not None:
            needed.append(producer)
    return max(needed, key=places.__getitem__)


def _rotated_alike(parts: Sequence[ir.Value]) -> tuple[ir.Node, ir.Node] | None:
    """The two nodes that rotate the first two parts by the same angles, where nothing else reads these parts."""
    nodes = [_only_user(part, "RotaryEmbedding") for part in parts[:2]]
    first, second = nodes if len(nodes) == 2 else (None, None)
    if first is None or second is None or list(first.inputs[1:]) != list(second.inputs[1:]):
        return None
    same = {n: a.value for n, a in first.attributes.items()} == {
        n: a.value for n, a in second.attributes.items()
    }
    return (first, second) if same else None


def _split(
    graph: ir.Graph, whole: ir.Value, counts: Sequence[int], parts: Sequence[ir.Value | None], name: str
) -> ir.Node:
    """Splits heads; what read `parts` reads the outputs."""
    sizes = _integers(graph, f"{name}_counts", counts)
    node = ir.Node("", "Split", [whole, sizes], [ir.AttrInt64("axis", 1)], num_outputs=len(parts))
    for part, out in zip(parts, node.outputs, strict=True):
        if part is not None:
            out.name, out.shape, out.type = f"{part.name}_head", part.shape, part.type
            part.replace_all_uses_with(out, replace_graph_outputs=True)
    return node


def _integers(graph: ir.Graph, name: str, numbers: Sequence[int]) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(np.array(numbers, np.int64)))
    value.shape, value.type = ir.Shape([len(numbers)]), ir.TensorType(ir.DataType.INT64)
    graph.initializers[name] = value
    return value


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    users = [use.node for use in value.uses()]
    if len(users) != 1 or users[0].op_type != op_type or value.is_graph_output():
        return None
    return users[0]


def _target(reshape: ir.Node) -> list[int]:
    target = _constant(reshape.inputs[1])
    assert target is not None
    return target


def _size(reshape: ir.Node) -> int:
    return _target(reshape)[3]


def _constant(value: ir.Value | None) -> list[int] | None:
    if value is None or value.const_value is None:
        return None
    return [int(number) for number in value.const_value.numpy().reshape(-1)]


def _axis(split: ir.Node) -> int:
    return split.attributes["axis"].as_int() if "axis" in split.attributes else 0
