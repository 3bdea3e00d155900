"""The opset and the operators that a lowered graph may hold, and the types that each takes there.

Source of `TENSORRT_10_3`: `docs/operators.md` of onnx-tensorrt, NVIDIA's ONNX parser of TensorRT, at 10.1-GA (commit 96e7811)
and at 10.6-GA (0137504), the nearest releases on both sides of 10.3-GA that were at hand; `docs/Changelog.md` of the latter
says that 10.3 lets the axes of `Slice` be no constants, and names no operator that 10.2 to 10.6 took away. Listed is what both
tables mark as supported in float32, float16 and bfloat16, or as needing no float, with no further restriction than:

    axes of reductions, of Squeeze and Unsqueeze   constants, as lowered graphs have them
    LayerNormalization                             its first output only
    TopK                                           K below 3,840, sorted

`ScatterElements`, which the graphs `penalties` and `repeats` have since, was looked up in the tables of 10.1-GA and of 10.15:
supported in float32, float16, bfloat16 and int64, no restriction (int64 also of `Equal`, `Less`, `Where`, `Slice`, `Expand` and
`GatherElements`, which these graphs use with it). The changelog says that 10.3 took another plugin for it, and in 10.1's source a
plugin does it only where the numbers are to be added or compared (`reduction`): ours never are. Indices repeat there, but all
that do write the same number.

What is listed as restricted is checked, node by node (`refusal`).
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from ...runtime.common.errors import ExportError
from .rewriter import Rewriter, given, number_of

OPSET, IR_VERSION = 17, 8

TENSORRT_10_3 = frozenset((
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "Ceil", "Clip", "Concat", "Constant", "ConstantOfShape", "Conv",
    "Cos", "Div", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Gemm",
    "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LayerNormalization", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "MatMul", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Range", "Reciprocal",
    "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Relu", "Reshape", "Round", "ScatterElements", "Shape",
    "Sigmoid", "Sign", "Sin", "Slice", "Softmax", "Softplus", "Split", "Sqrt", "Squeeze", "Sub", "Tanh", "Tile", "TopK",
    "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
"""Operators that the parser of TensorRT 10.3 imports."""

AXES_GIVEN = ("ReduceSum", "Squeeze", "Unsqueeze")
"""Take their axes as an input, not as an attribute."""

MOST_RANKED = 3840
"""TopK: K must be below this."""


def check_operators(graph: ir.Graph) -> None:
    """Raises ExportError for an operator that TensorRT 10.3 has not, or would refuse."""
    for node in graph:
        if node.domain not in ("", "ai.onnx") or node.op_type not in TENSORRT_10_3:
            raise ExportError(
                f"the operator {node.op_type} ({node.name!r}) has no lowering for TensorRT 10.3; it needs --lowering native"
            )
        reason = refusal(node)
        if reason is not None:
            raise ExportError(
                f"{node.op_type} {node.name!r} {reason}, for TensorRT 10.3; it needs --lowering native"
            )


def refusal(node: ir.Node) -> str | None:
    """What a node of a listed operator would have to do otherwise; None where nothing."""
    if node.op_type == "TopK":
        wanted = given(node, 1).const_value
        constant = wanted is not None and int(wanted.numpy().item()) < MOST_RANKED
        fits = constant and number_of(node, "sorted", 1)
        return None if fits else f"must rank a constant number below {MOST_RANKED}, sorted"
    if node.op_type in AXES_GIVEN:
        axes = node.inputs[1] if len(node.inputs) > 1 else None
        return None if axes is None or axes.const_value is not None else "must have constant axes"
    if node.op_type == "LayerNormalization":
        return None if len(node.outputs) == 1 else "must have one output"
    if node.op_type == "ScatterElements":
        reduction = node.attributes.get("reduction")
        replaces = reduction is None or reduction.value == "none"
        return None if replaces else "must replace numbers, not reduce them"
    return None


def widen_refused_types(graph: ir.Graph, write: Rewriter) -> None:
    """Casts to float32 around operators that take no bfloat16 in this opset (Conv, HardSwish, TopK), in place. Every
    value of `graph` has a type."""
    for node in list(graph):
        schema = onnx.defs.get_schema(node.op_type, OPSET)
        allowed = {each.type_param_str: set(each.allowed_type_strs) for each in schema.type_constraints}
        write.before(node)
        for place, value in enumerate(node.inputs):
            kind = schema.inputs[min(place, len(schema.inputs) - 1)].type_str
            if value is not None and _refused(value, allowed.get(kind)):
                node.replace_input_with(place, write.cast(value, ir.DataType.FLOAT))
        for place, value in enumerate(node.outputs):
            kind = schema.outputs[min(place, len(schema.outputs) - 1)].type_str
            if _refused(value, allowed.get(kind)):
                _cast_back(graph, node, value)


def _refused(value: ir.Value, allowed: set[str] | None) -> bool:
    return value.dtype == ir.DataType.BFLOAT16 and allowed is not None and "tensor(bfloat16)" not in allowed


def _cast_back(graph: ir.Graph, node: ir.Node, wide: ir.Value) -> None:
    """Lets `wide`, an output of `node`, be float32, and whoever read it read a cast of it."""
    readers, output, name = list(wide.uses()), wide.is_graph_output(), wide.name
    cast = ir.node("Cast", [wide], {"to": int(ir.DataType.BFLOAT16)}, name=f"{node.name}/narrow")
    graph.insert_after(node, cast)
    narrow = cast.outputs[0]
    narrow.type, narrow.shape = wide.type, wide.shape
    wide.name, wide.type = f"{name}/wide", ir.TensorType(ir.DataType.FLOAT)
    narrow.name = name
    for reader in readers:
        reader.node.replace_input_with(reader.idx, narrow)
    if output:
        graph.outputs[graph.outputs.index(wide)] = narrow
