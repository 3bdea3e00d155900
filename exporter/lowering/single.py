"""Single operators in those of opset 17: norms, activations, rotations, and forms that later opsets have changed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ...runtime.common.errors import ExportError
from .rewriter import Rewriter, given, number_of, refuse_attributes, size

Rule = Callable[[Rewriter, ir.Node], None]


def rms_norm(write: Rewriter, node: ir.Node) -> None:
    """x / sqrt(mean(x²) + epsilon) × weight over the last dimension. The exporter has it in float32 always."""
    refuse_attributes(node, ("epsilon", "axis"))
    if number_of(node, "axis", -1) != -1:
        raise ExportError(f"RMSNormalization {node.name!r} is not over the last dimension")
    operand, weight = given(node, 0), given(node, 1)
    epsilon = write.constant(number_of(node, "epsilon", 1e-5), operand.dtype)
    mean = write.add("ReduceMean", write.add("Mul", operand, operand), axes=[-1], keepdims=1)
    root = write.add("Sqrt", write.add("Add", mean, epsilon))
    write.replace(node, write.add("Mul", write.add("Div", operand, root), weight))


def gelu(write: Rewriter, node: ir.Node) -> None:
    """x/2 × (1 + erf(x/√2)), or its approximation by tanh."""
    refuse_attributes(node, ("approximate",))
    operand = given(node, 0)

    def times(value: ir.Value, factor: float) -> ir.Value:
        return write.add("Mul", value, write.constant(factor, operand.dtype))

    approximate = node.attributes.get("approximate")
    if approximate is not None and approximate.as_string() == "tanh":
        # A cube beyond float16 becomes infinite, and its tanh 1: the result is right all the same.
        cube = write.add("Mul", write.add("Mul", operand, operand), operand)
        inner = write.add("Add", operand, times(cube, 0.044715))
        bent = write.add("Tanh", times(inner, math.sqrt(2 / math.pi)))
    else:
        bent = write.add("Erf", times(operand, math.sqrt(0.5)))
    share = write.add("Add", bent, write.constant(1.0, operand.dtype))
    write.replace(node, write.add("Mul", times(operand, 0.5), share))


def mish(write: Rewriter, node: ir.Node) -> None:
    """x × tanh(log(1 + eˣ)); an operator of its own from opset 18 on."""
    operand = given(node, 0)
    write.replace(node, write.add("Mul", operand, write.add("Tanh", write.add("Softplus", operand))))


def rotary(write: Rewriter, node: ir.Node) -> None:
    """Rotates the two halves of the last dimension of [batch, heads, width, head_dim] by angles whose `cos` and `sin`
    are [batch, width, head_dim / 2]."""
    refuse_attributes(node, ("interleaved", "rotary_embedding_dim", "num_heads"))
    states, half = given(node, 0), size(given(node, 0), 3) // 2
    partly = number_of(node, "rotary_embedding_dim", 0) not in (0, 2 * half)
    if partly or number_of(node, "interleaved", 0) or any(v is not None for v in node.inputs[3:]):
        raise ExportError(
            f"RotaryEmbedding {node.name!r} is of another kind than the exporter makes; it cannot be lowered"
        )
    heads = write.integers(1)
    cos, sin = (write.add("Unsqueeze", given(node, place), heads) for place in (1, 2))
    first, second = write.add_many("Split", states, write.integers(half, half), count=2, axis=-1)
    turned = (
        write.add("Sub", write.add("Mul", first, cos), write.add("Mul", second, sin)),
        write.add("Add", write.add("Mul", first, sin), write.add("Mul", second, cos)),
    )
    write.replace(node, write.add("Concat", *turned, axis=-1))


def log_sum_exp(write: Rewriter, node: ir.Node) -> None:
    """log Σ eˣ over the highest x: TensorRT's parser takes the sum of eˣ itself, which overflows from x = 88 on."""
    refuse_attributes(node, ("keepdims", "noop_with_empty_axes"))
    operand, axes = given(node, 0), _numbers(node, 1)
    highest = write.add("ReduceMax", operand, axes=axes, keepdims=1)
    powers = write.add("Exp", write.add("Sub", operand, highest))
    total = write.add("ReduceSum", powers, write.integers(*axes), keepdims=1)
    result = write.add("Add", write.add("Log", total), highest)
    if not number_of(node, "keepdims", 1):
        result = write.add("Squeeze", result, write.integers(*axes))
    write.replace(node, result)


def squeeze(write: Rewriter, node: ir.Node) -> None:
    """Names the axes where none are given."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return
    operand = given(node, 0)
    axes = [axis for axis in range(len(operand.shape or ())) if size(operand, axis) == 1]
    write.replace(node, write.add("Squeeze", operand, write.integers(*axes)))


def split(write: Rewriter, node: ir.Node) -> None:
    """Without `num_outputs`, which opset 17 reads off the outputs."""
    node.attributes.pop("num_outputs", None)


def cast(write: Rewriter, node: ir.Node) -> None:
    """Without what later opsets say of float8, of which no graph is."""
    for name in ("saturate", "round_mode"):
        node.attributes.pop(name, None)


RULES: dict[str, Rule] = {
    "Cast": cast, "Gelu": gelu, "Mish": mish, "RMSNormalization": rms_norm, "ReduceLogSumExp": log_sum_exp,
    "RotaryEmbedding": rotary, "Split": split, "Squeeze": squeeze,
}  # fmt: skip
"""Operators of a bundle's graphs that opset 17 has not, or in another form."""


def _numbers(node: ir.Node, position: int) -> list[int]:
    """A constant input, int64 [n]."""
    tensor = given(node, position).const_value
    if tensor is None:
        raise ExportError(f"input {position} of {node.op_type} {node.name!r} must be a constant to lower it")
    return np.atleast_1d(tensor.numpy()).tolist()
