"""Builds one graph of a bundle out of templates; weights become references into the shared file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ...runtime.common.errors import ExportError
from ..quantization.blocks import BLOCK
from .dtypes import ONNX
from .hooks import OPSET
from .traced_module import Template
from .weights import WeightRef, WeightStore

INLINE_BYTES = 1024  # constants below this stay inside the graph

# Names of the axes in `docs/reference/graph-interfaces.md`
Dims = Sequence[str | int]


class Composer:
    """Collects nodes of one graph. Values are handed around; names stay unique by prefixing.

    Inputs and outputs of a `role` that the runtime knows are declared by name alone: dtype and shape are those that the
    runtime will bind (`runtime/bundle/interfaces.py`), for `layers` [first, end) of a segment.
    """

    def __init__(
        self, name: str, store: WeightStore, role: str | None = None, layers: tuple[int, int] | None = None
    ) -> None:
        self.name = name
        self._store = store
        self._inputs, self._outputs = ({}, {}) if role is None else store.interface(role, layers, name)
        self._graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
        self._weights: dict[WeightRef, ir.Value] = {}
        self._constants: dict[tuple, ir.Value] = {}

    def input(self, name: str, dtype: str = "", shape: Dims = ()) -> ir.Value:
        """Declares a graph input; `dtype` and `shape` of one that the graph's role does not imply."""
        dtype, shape = self._inputs[name] if self._inputs else (dtype, shape)
        value = ir.Value(name=name, shape=ir.Shape(list(shape)), type=ir.TensorType(ONNX[dtype]))
        self._graph.inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, dtype: str = "", shape: Dims = ()) -> None:
        """Declares `value` as the graph output `name`; `dtype` and `shape` as for an input."""
        dtype, shape = self._outputs[name] if self._outputs else (dtype, shape)
        if value.is_graph_output() or value.is_graph_input():
            value = self.node("Identity", [value])
        value.name, value.shape, value.type = name, ir.Shape(list(shape)), ir.TensorType(ONNX[dtype])
        self._graph.outputs.append(value)

    def node(
        self, op_type: str, inputs: Sequence[ir.Value | None], name: str = "", **attributes: object
    ) -> ir.Value:
        """Appends one node with one output."""
        return self.nodes(op_type, inputs, 1, name, **attributes)[0]

    def nodes(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        count: int,
        name: str = "",
        **attributes: object,
    ) -> list[ir.Value]:
        """Appends one node with `count` outputs."""
        node = ir.node(op_type, inputs, attributes, num_outputs=count)  # type: ignore[arg-type]
        node.name = name or f"{op_type}_{len(self._graph)}"
        for index, output in enumerate(node.outputs):
            output.name = f"{node.name}_out" if count == 1 else f"{node.name}_out{index}"
        self._graph.append(node)
        return list(node.outputs)

    def constant(self, array: np.ndarray) -> ir.Value:
        """A small constant, shared by value."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            if array.nbytes > INLINE_BYTES and array.nbytes > 65536:
                raise ExportError(
                    f"a constant of {array.nbytes} bytes in {self.name} is no weight of the checkpoint"
                )
            tensor = ir.tensor(np.array(array))
            value = ir.Value(
                name=f"constant_{len(self._constants)}",
                shape=ir.Shape(tensor.numpy().shape),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            self._graph.initializers[value.name] = value  # type: ignore[index]
            self._constants[key] = value
        return self._constants[key]

    def weight(self, ref: WeightRef) -> ir.Value:
        """An initializer that points at a weight of the shared file."""
        if ref not in self._weights:
            name = "+".join(ref.names) + (".T" if ref.transpose else "")
            tensor = self._store.external(name, ref)
            value = ir.Value(
                name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            self._graph.initializers[name] = value
            self._weights[ref] = value
        return self._weights[ref]

    def call(
        self,
        template: Template,
        prefix: str,
        inputs: Mapping[str, ir.Value],
        checkpoint_name: Callable[[str], str],
    ) -> dict[str, ir.Value]:
        """Copies a template's nodes. `checkpoint_name` maps a parameter of the traced module to a checkpoint tensor.

        A matrix that stays in the checkpoint's own file lies there as [out, in], one tensor each: products with it are
        composed as such (`_product`). One that is stored as integers is dequantised in front of its product.
        """
        values: dict[ir.Value, ir.Value] = {}
        linked: dict[ir.Value, list[WeightRef]] = {}
        dequantized: set[ir.Value] = set()
        for value in template.graph.inputs:
            name = value.name or ""
            if name in template.weights:
                source = template.weights[name]
                names = tuple(checkpoint_name(p) for p in source.parameters)
                ref = WeightRef(names, source.transpose, source.shape)
                quantized = self._store.quantized(ref)
                if quantized is not None:
                    if not (_multiplies(value) if source.transpose else _multiplies_as_stored(value)):
                        raise ExportError(
                            f"{self.name}: {prefix} reads {' + '.join(names)}, which is stored as integers, not in products only"
                        )
                    values[value] = self._dequantized(*quantized, prefix)
                    dequantized.add(value)
                    continue
                parts = self._store.parts(ref) if source.transpose and _multiplies(value) else None
                if parts is None:
                    values[value] = self.weight(ref)
                else:
                    linked[value] = parts
            elif name in inputs:
                values[value] = inputs[name]
            else:
                raise ExportError(f"{self.name}: {prefix} needs an input {name!r}")
        for value in template.graph.initializers.values():
            values[value] = self.constant(value.const_value.numpy())  # type: ignore[union-attr]
        for node in template.graph:
            if node.op_type == "MatMul" and node.inputs[1] in linked:
                left, matrix = node.inputs
                assert left is not None and matrix is not None and left.shape is not None
                product = self._product(prefix, values[left], len(left.shape), linked[matrix])
                values[node.outputs[0]] = product
                continue
            if node.op_type == "Gemm" and node.inputs[1] in dequantized:
                left, matrix, *bias = (None if v is None else values[v] for v in node.inputs)
                out = self.node("MatMul", [left, matrix], f"{prefix}/MatMul_{len(self._graph)}")
                if bias:
                    out = self.node("Add", [out, *bias], f"{prefix}/Add_{len(self._graph)}")
                values[node.outputs[0]] = out
                continue
            # Optional outputs that nobody reads must not be declared: engines would compute them.
            count = max(
                (i + 1 for i, o in enumerate(node.outputs) if o.uses() or o.is_graph_output()), default=1
            )
            copy = ir.Node(
                node.domain,
                node.op_type,
                [None if v is None else values[v] for v in node.inputs],
                list(node.attributes.values()),
                num_outputs=count,
                name=f"{prefix}/{node.op_type}_{len(self._graph)}",
            )
            for old, new in zip(node.outputs, copy.outputs, strict=False):
                new.name = f"{prefix}/{old.name}"
                values[old] = new
            self._graph.append(copy)
        return dict(zip(template.outputs, (values[v] for v in template.graph.outputs), strict=True))

    def product(self, hidden_states: ir.Value, matrix: WeightRef, name: str) -> ir.Value:
        """`hidden_states` [N, in] times a matrix [out, in], however that is stored; `name` is that of the node."""
        quantized = self._store.quantized(matrix)
        if quantized is None:
            return self.node("Gemm", [hidden_states, self.weight(matrix)], name, transB=1)
        return self.node(
            "MatMul", [hidden_states, self._dequantized(*quantized, name.rpartition("/")[0])], name
        )

    def _dequantized(self, integers: WeightRef, scales: WeightRef, prefix: str) -> ir.Value:
        """A matrix [in, out] of blocks along its first axis; `prefix` is that of the layer that reads it."""
        name = f"DequantizeLinear_{len(self._graph)}"
        return self.node(
            "DequantizeLinear",
            [self.weight(integers), self.weight(scales)],
            f"{prefix}/{name}" if prefix else name,
            axis=0,
            block_size=BLOCK,
        )

    def _product(
        self, prefix: str, hidden_states: ir.Value, rank: int, matrices: Sequence[WeightRef]
    ) -> ir.Value:
        """`hidden_states` [..., in] times every matrix [out, in], side by side: [..., sum of out]."""

        def node(op_type: str, inputs: Sequence[ir.Value], **attributes: object) -> ir.Value:
            return self.node(op_type, inputs, f"{prefix}/{op_type}_{len(self._graph)}", **attributes)

        wide, width = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        flat = hidden_states
        if rank != 2:
            flat = node("Reshape", [hidden_states, self.constant(np.array([-1, width], np.int64))])
        products = [node("Gemm", [flat, self.weight(matrix)], transB=1) for matrix in matrices]
        joined = products[0] if len(products) == 1 else node("Concat", products, axis=1)
        if rank == 2:
            return joined
        leading = node("Shape", [hidden_states], start=0, end=-1)
        shape = node("Concat", [leading, self.constant(np.array([wide], np.int64))], axis=0)
        return node("Reshape", [joined, shape])

    def model(self) -> ir.Model:
        """The finished model. Raises ExportError when it lacks an input or output of its role."""
        for kind, wanted, values in (
            ("input", self._inputs, self._graph.inputs),
            ("output", self._outputs, self._graph.outputs),
        ):
            missing = sorted(set(wanted) - {value.name for value in values})
            if missing:
                raise ExportError(f"{self.name}: no {kind} {', '.join(missing[:4])}, which its role needs")
        return ir.Model(self._graph, ir_version=10, producer_name="vlmexport")


def _multiplies(matrix: ir.Value) -> bool:
    """Whether a template reads a matrix in products with it only."""
    return all(use.node.op_type == "MatMul" and use.idx == 1 for use in matrix.uses())


def _multiplies_as_stored(matrix: ir.Value) -> bool:
    """Whether a template reads a matrix [out, in] in `Gemm` as PyTorch's linear layers do only: transposed, unscaled."""
    usual = {"transA": 0, "transB": 1, "alpha": 1.0, "beta": 1.0}

    def linear(node: ir.Node) -> bool:
        return node.op_type == "Gemm" and all(
            node.attributes[name].value == value if name in node.attributes else name != "transB"
            for name, value in usual.items()
        )

    return all(linear(use.node) and use.idx == 1 for use in matrix.uses())
