"""Retyping a float32 graph to float16 or bfloat16, strongly typed, with float32 islands.

GPU engines take every type from the graph (strongly typed), so casts are placed here: norms, rotary angles and other
statistics stay float32, matrix products and attention run in the narrow type. T5 overflows float16 in its residual
stream and in the last product of its feed-forward, so `wide_residual` keeps both in float32, as transformers does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx
from onnx import TensorProto, helper

FLOAT = TensorProto.FLOAT
NARROW = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}

WIDE_OPS = frozenset(
    (
        *(
            "RMSNormalization",
            "LayerNormalization",
            "InstanceNormalization",
            "GroupNormalization",
            "Pow",
            "ReduceLogSumExp",
            "ReduceMean",
        ),
        *("ReduceSum", "ReduceSumSquare", "ReduceL2", "Sqrt", "Reciprocal", "Exp", "Log", "Sin", "Cos"),
    )
)
"""Always computed in float32."""

MOVING_OPS = frozenset(
    (
        *("Reshape", "Transpose", "Identity", "Split", "Slice", "Unsqueeze", "Squeeze", "Expand", "Gather"),
        *("GatherElements", "GatherND", "Flatten", "Tile", "Concat", "Pad", "DepthToSpace", "SpaceToDepth"),
        "TopK",
    )
)
"""Move numbers without computing: they keep the type of their first input."""

WIDE_VALUES = frozenset({"pixel_values", "logits", "raw_logits", "seen", "seen_now", "penalty"})
"""Inputs and outputs that are float32 at the interface of every graph; a cast is inside. A graph that has no others computes
in float32."""

WIDE_RESIDUAL = frozenset({"t5"})
"""Decoders, by their name in a manifest, whose residual stream overflows float16: it stays float32 there."""

STATE = "recurrent_state."
"""How the names of inputs begin that are states of linear attention."""

DECAYS = frozenset({"Exp", "ReduceLogSumExp"})
"""What the decays of such a state are made by."""

STREAM = frozenset({"hidden", "encoder_rows", "hidden_out"})
"""Inputs and outputs that are the residual stream."""


def value_types(model: onnx.ModelProto) -> dict[str, int]:
    """Element type of every value that ONNX can infer (weights need not be loaded)."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False, data_prop=False)
    graph = inferred.graph
    types = {t.name: t.data_type for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        types[value.name] = value.type.tensor_type.elem_type
    return types


def wide_nodes(model: onnx.ModelProto, types: dict[str, int], *, wide_residual: bool) -> set[int]:
    """Indices of the nodes that compute in float32."""
    nodes = list(model.graph.node)
    maker = {output: index for index, node in enumerate(nodes) for output in node.output}
    wide = {i for i, n in enumerate(nodes) if n.op_type in WIDE_OPS}
    for index, node in enumerate(nodes):
        if node.op_type in MOVING_OPS or not any(types.get(o) == FLOAT for o in node.output):
            continue
        if not any(types.get(name) == FLOAT for name in node.input):
            wide.add(index)  # numbers born as float32: casts of positions, constants of a shape
    for node in nodes:  # what makes the scale of a norm of its weight
        if node.op_type == "RMSNormalization" and node.input[1] in maker:
            wide.add(maker[node.input[1]])
    angles = [i for i, n in enumerate(nodes) if n.op_type in ("Sin", "Cos")]
    while angles:  # what leads to an angle: positions × frequencies loses whole turns in a narrow type
        for name in nodes[angles.pop()].input:
            index = maker.get(name)
            if index is not None and types.get(name) == FLOAT and index not in wide:
                wide.add(index)
                angles.append(index)
    if any(value.name.startswith(STATE) for value in model.graph.input):
        wide |= _state_nodes(nodes, {tensor.name for tensor in model.graph.initializer})
    if wide_residual:
        wide |= _residual_nodes(nodes, maker)
    return wide


def _state_nodes(nodes: list[onnx.NodeProto], weights: set[str]) -> set[int]:
    """What computes with the states of linear attention, which sums up a whole sequence: decays and what they are made of, products
    of two values, neither a weight, and all that follows from these, up to the next norm."""
    wide: set[int] = set()
    values: set[str] = set()
    summed: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.op_type == "RMSNormalization":
            continue
        product = node.op_type == "MatMul" and not weights & {*node.input}
        if product or node.op_type in DECAYS or values & {*node.input}:
            values |= {*node.output}
            if node.op_type not in MOVING_OPS:
                wide.add(index)
        if node.op_type == "ReduceLogSumExp":
            wide |= {summed[name] for name in node.input if name in summed}
        if node.op_type == "Add":
            summed |= dict.fromkeys(node.output, index)
        elif node.op_type in MOVING_OPS:
            summed |= {out: summed[name] for name in node.input if name in summed for out in node.output}
    return wide


def _residual_nodes(nodes: list[onnx.NodeProto], maker: dict[str, int]) -> set[int]:
    """The Adds of the residual stream, and the last product of each feed-forward that is added to it."""
    stream = set(STREAM)
    indices: set[int] = set()
    for index, node in enumerate(nodes):
        if node.op_type != "Add" or not stream & set(node.input):
            continue
        stream.add(node.output[0])
        indices.add(index)
        for name in node.input:
            product, left = _product(nodes, maker, name)
            source = maker.get(left)
            # The attention's output product reads a transposed value; the feed-forward's reads an activation.
            if product is None or source is None:
                continue
            if nodes[source].op_type not in MOVING_OPS | {"Attention"}:
                indices.add(product)
    return indices


def _product(nodes: list[onnx.NodeProto], maker: dict[str, int], name: str) -> tuple[int | None, str]:
    """The node that multiplies an input with a matrix to make `name`, and that input: a MatMul, or, of a linked matrix, a
    Gemm between two Reshapes (`Composer`). None where another kind of node makes it."""
    index = maker.get(name)
    if index is None or nodes[index].op_type not in ("MatMul", "Reshape"):
        return None, ""
    if nodes[index].op_type == "MatMul":
        return index, nodes[index].input[0]
    inner = maker.get(nodes[index].input[0])
    if inner is None or nodes[inner].op_type != "Gemm":
        return None, ""
    flat = maker.get(nodes[inner].input[0])
    return inner, nodes[inner].input[0] if flat is None else nodes[flat].input[0]


def retype(
    model: onnx.ModelProto,
    precision: str,
    *,
    wide_residual: bool = False,
    bound: Mapping[str, int] | None = None,
    stored: Collection[str] = (),
) -> dict[str, int]:
    """Retypes `model` in place to `precision` and returns initializer name → wanted element type.

    Initializer data is not touched: the caller converts it (it lies in an external file). float32 leaves everything.

    Args:
        bound: element types of inputs and outputs; those that are not in it become narrow, but for `WIDE_VALUES` and,
            with `wide_residual`, `STREAM`.
        stored: initializers whose data is narrow already: what reads them in float32 gets a cast, where others take
            the type of their first reader.
    """
    graph = model.graph
    types = value_types(model)
    wanted = {t.name: t.data_type for t in graph.initializer}
    if precision == "float32":
        return wanted
    ends = (*graph.input, *graph.output)
    if {value.name for value in ends if value.type.tensor_type.elem_type == FLOAT} <= WIDE_VALUES:
        return wanted
    narrow = NARROW[precision]
    kept = WIDE_VALUES | STREAM if wide_residual else WIDE_VALUES

    def bound_as(name: str) -> int:
        usual = FLOAT if name in kept else narrow
        return usual if bound is None else bound.get(name, usual)

    wide = wide_nodes(model, types, wide_residual=wide_residual)
    floats = {name for name, kind in types.items() if kind == FLOAT}
    initializers = {t.name for t in graph.initializer}
    current: dict[str, int] = {}
    for value in graph.input:
        if value.name in floats and value.name not in initializers:
            current[value.name] = bound_as(value.name)
            value.type.tensor_type.elem_type = current[value.name]

    outputs = {o.name for o in graph.output}
    result: list[onnx.NodeProto] = []
    casts: dict[tuple[str, int], str] = {}
    first_use: dict[str, int] = dict.fromkeys(stored, narrow)

    def reader(name: str, kind: int) -> str:
        """The name under which `name` can be read as `kind`; weights take the type of their first use."""
        if name in initializers:
            if first_use.setdefault(name, kind) == kind:
                return name
        elif current[name] == kind:
            return name
        if (name, kind) not in casts:
            casts[name, kind] = f"{name}/as_{TensorProto.DataType.Name(kind).lower()}"
            result.append(
                helper.make_node("Cast", [name], [casts[name, kind]], name=casts[name, kind], to=kind)
            )
        return casts[name, kind]

    renamed: dict[str, str] = {}
    for index, node in enumerate(graph.node):
        kind = FLOAT if index in wide else narrow
        float_inputs = [name for name in node.input if name in floats]
        if node.op_type in MOVING_OPS and float_inputs:
            lead = float_inputs[0]
            kind = first_use.get(lead, narrow) if lead in initializers else current[lead]
        for position, name in enumerate(node.input):
            if name in floats:
                node.input[position] = reader(renamed.get(name, name), kind)
        if node.op_type == "Cast" and node.output[0] in floats:
            kind = FLOAT if index in wide else narrow
            for attribute in node.attribute:
                if attribute.name == "to":
                    attribute.i = kind
        result.append(node)
        for position, name in enumerate(node.output):
            if name not in floats:
                continue
            current[name] = kind
            if name in outputs:
                goal = bound_as(name)
                if goal != kind:  # the output keeps its name, the value gets another
                    inner = f"{name}/inner"
                    node.output[position] = inner
                    renamed[name], current[inner], current[name] = inner, kind, goal
                    result.append(helper.make_node("Cast", [inner], [name], name=f"{name}/cast", to=goal))
    for value in graph.output:
        if value.name in floats:
            value.type.tensor_type.elem_type = current[value.name]
    del graph.node[:]
    graph.node.extend(result)
    del graph.value_info[:]
    drop_round_trips(model)
    return {name: first_use.get(name, kind) for name, kind in wanted.items()}


def drop_round_trips(model: onnx.ModelProto) -> None:
    """Reads a narrow value itself where it was cast to float32 only to be cast back."""
    graph = model.graph
    types = value_types(model)
    makers = {output: node for node in graph.node for output in node.output}
    outputs = {o.name for o in graph.output}
    for node in graph.node:
        wide = makers.get(node.input[0]) if node.op_type == "Cast" else None
        if wide is None or wide.op_type != "Cast" or types.get(node.input[0]) != FLOAT:
            continue
        source = wide.input[0]
        if types.get(source) == types.get(node.output[0]) and types.get(source) in NARROW.values():
            node.op_type, node.input[0] = "Identity", source
            del node.attribute[:]
    renamed: dict[str, str] = {}
    kept = []
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = renamed.get(name, name)
        if node.op_type == "Identity" and node.output[0] not in outputs:
            renamed[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    used = {name for node in kept for name in node.input} | outputs
    kept = [node for node in kept if node.op_type != "Cast" or node.output[0] in used]
    del graph.node[:]
    graph.node.extend(kept)
