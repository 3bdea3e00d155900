"""Puts operators in the place of others, in a graph whose values have types and shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from ...runtime.common.errors import ExportError


class Rewriter:
    """Writes nodes in front of a node, and lets a value take the place of the one that the node made."""

    def __init__(self, graph: ir.Graph, name: str = "lowered") -> None:
        """`name` is that of the constants, which no other of the graph may have."""
        self.graph, self._name = graph, name
        self._anchor: ir.Node
        self._count = 0
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def before(self, node: ir.Node) -> None:
        """Where nodes are written from now on."""
        self._anchor = node

    def add(
        self, op_type: str, *inputs: ir.Value, dtype: ir.DataType | None = None, **attributes: object
    ) -> ir.Value:
        """A node with one output, which has the type of the first input unless `dtype` says otherwise."""
        return self.add_many(op_type, *inputs, count=1, dtype=dtype, **attributes)[0]

    def add_many(
        self,
        op_type: str,
        *inputs: ir.Value,
        count: int,
        dtype: ir.DataType | None = None,
        **attributes: object,
    ) -> list[ir.Value]:
        """A node with `count` outputs of one type."""
        node = ir.node(op_type, inputs, attributes, num_outputs=count)  # type: ignore[arg-type]
        node.name = f"{self._anchor.name}/{op_type}_{self._count}"
        self._count += 1
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}_out{index}"
            value.type = inputs[0].type if dtype is None else ir.TensorType(dtype)
        self.graph.insert_before(self._anchor, node)
        return list(node.outputs)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """`value` as `dtype`."""
        if value.dtype == dtype:
            return value
        made = self.add("Cast", value, dtype=dtype, to=int(dtype))
        made.shape = value.shape
        return made

    def integers(self, *numbers: int) -> ir.Value:
        """A constant int64 [n]."""
        return self._constant(np.array(numbers, np.int64))

    def constant(self, value: float, dtype: ir.DataType | None) -> ir.Value:
        """A constant scalar."""
        assert dtype is not None, "of a value whose type is known"
        return self._constant(np.array(value, dtype.numpy()))

    def replace(self, node: ir.Node, value: ir.Value) -> None:
        """`value` takes the place of the first output of `node`, with its name where that is an output of the graph;
        the node goes."""
        old = node.outputs[0]
        if old.is_graph_output() and (value.is_graph_input() or value.is_graph_output()):
            value = self.add("Identity", value)
        value.type, value.shape = old.type, old.shape
        if old.is_graph_output():
            old.name, value.name = f"{old.name}/replaced", old.name
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)

    def _constant(self, array: np.ndarray) -> ir.Value:
        key = (array.dtype.str + array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.tensor(array)
            value = ir.Value(
                name=f"{self._name}/constant_{len(self._constants)}",
                shape=ir.Shape(array.shape),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]


def typed(model: ir.Model) -> ir.Model:
    """A copy whose values have types and, as far as ONNX can infer them, shapes."""
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def size(value: ir.Value | None, axis: int) -> int:
    """A dimension that must be a number. Raises ExportError where it is not known."""
    dimension = None if value is None or value.shape is None else value.shape[axis]
    if not isinstance(dimension, int):
        name = "?" if value is None else value.name
        raise ExportError(
            f"dimension {axis} of {name} must be a number to lower the graph, it is {dimension}"
        )
    return dimension


def given(node: ir.Node, position: int) -> ir.Value:
    """An input that must be there. Raises ExportError where it is not."""
    value = node.inputs[position] if position < len(node.inputs) else None
    if value is None:
        raise ExportError(f"{node.op_type} {node.name!r} has no input {position}, so it cannot be lowered")
    return value


def refuse_attributes(node: ir.Node, known: Sequence[str]) -> None:
    """Raises ExportError for an attribute that a rule does not know: leaving it out would compute something else."""
    odd = sorted(set(node.attributes) - set(known))
    if odd:
        raise ExportError(f"{node.op_type} {node.name!r} has the attribute {odd[0]}, which cannot be lowered")


def number_of(node: ir.Node, name: str, default: float) -> float:
    """A number among the attributes."""
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)  # type: ignore[arg-type]
