"""Builds one graph of a bundle out of templates; weights become references into the shared file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ...runtime.common.errors import ExportError
from .dtypes import ONNX
from .hooks import OPSET
from .traced_module import Template
from .weights import IntegerRef, WeightRef, WeightStore

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

    def takes(self, name: str) -> bool:
        """Whether the graph's role implies an input of that name."""
        return name in self._inputs

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

        A matrix that stays in the checkpoint's own file lies there as [out, in], one tensor each, and one that is stored as
        integers is dequantised: products with both are composed as such.
        """
        values: dict[ir.Value, ir.Value] = {}
        products: dict[ir.Value, Sequence[IntegerRef | WeightRef]] = {}
        for value in template.graph.inputs:
            name = value.name or ""
            if name in template.weights:
                source = template.weights[name]
                names = tuple(checkpoint_name(p) for p in source.parameters)
                ref = WeightRef(names, source.transpose, source.shape)
                parts = self._store.product_of(ref)
                if parts is not None:
                    self._check_products(value, ref, prefix)
                elif source.transpose and all(use.node.op_type == "MatMul" for use in value.uses()):
                    parts = self._store.parts(ref)
                if parts is None:
                    values[value] = self.weight(ref)
                else:
                    products[value] = parts
            elif name in inputs:
                values[value] = inputs[name]
            else:
                raise ExportError(f"{self.name}: {prefix} needs an input {name!r}")
        for value in template.graph.initializers.values():
            values[value] = self.constant(value.const_value.numpy())  # type: ignore[union-attr]
        for node in template.graph:
            if node.op_type in ("MatMul", "Gemm") and node.inputs[1] in products:
                left, matrix, *bias = node.inputs
                assert left is not None and matrix is not None and left.shape is not None
                assert None not in bias
                values[node.outputs[0]] = self._biased_products(
                    prefix, values[left], len(left.shape), products[matrix], [values[b] for b in bias if b]
                )
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
        """`hidden_states` [N, in], of integers [..., in], times a matrix [out, in], however that is stored; `name` is that of
        the node."""
        integers = self._store.integers_of(matrix)
        if integers is None:
            return self.node("Gemm", [hidden_states, self.weight(matrix)], name, transB=1)
        return self._integer_product(name.rpartition("/")[0], hidden_states, integers, name)

    def _integer_product(
        self, prefix: str, hidden_states: ir.Value, matrix: IntegerRef, name: str = ""
    ) -> ir.Value:
        """`hidden_states` [..., in] times integers [in, out] of blocks along their first axis."""

        def named(op_type: str) -> str:
            node = f"{op_type}_{len(self._graph)}"
            return f"{prefix}/{node}" if prefix else node

        if matrix.order is not None:
            inputs = [hidden_states, self.weight(matrix.order)]
            hidden_states = self.node("Gather", inputs, named("Gather"), axis=-1)
        parts = [self.weight(matrix.integers), self.weight(matrix.scales)]
        if matrix.zero_points is not None:
            parts.append(self.weight(matrix.zero_points))
        weights = self.node(
            "DequantizeLinear", parts, named("DequantizeLinear"), axis=0, block_size=matrix.block
        )
        return self.node("MatMul", [hidden_states, weights], name or named("MatMul"))

    def _biased_products(
        self,
        prefix: str,
        hidden_states: ir.Value,
        rank: int,
        matrices: Sequence[IntegerRef | WeightRef],
        bias: Sequence[ir.Value],
    ) -> ir.Value:
        """`_products` plus a bias, where there is one.

        ONNX Runtime makes one node of a product of rank 2, its bias and a ReLU behind it, and that node reads floats: integers
        would be dequantised at every run. So products with integers have rank 3 until the bias is added.
        """

        def node(op_type: str, *inputs: ir.Value) -> ir.Value:
            return self.node(op_type, inputs, f"{prefix}/{op_type}_{len(self._graph)}")

        raised = rank == 2 and bool(bias) and any(isinstance(matrix, IntegerRef) for matrix in matrices)
        if raised:
            first = self.constant(np.array([0], np.int64))
            hidden_states = node("Unsqueeze", hidden_states, first)
        out = self._products(prefix, hidden_states, rank + raised, matrices)
        for value in bias:
            out = node("Add", out, value)
        return node("Squeeze", out, self.constant(np.array([0], np.int64))) if raised else out

    def _products(
        self, prefix: str, hidden_states: ir.Value, rank: int, matrices: Sequence[IntegerRef | WeightRef]
    ) -> ir.Value:
        """`hidden_states` [..., in] times every matrix, side by side: [..., sum of out]. Floats are [out, in]."""

        def node(op_type: str, inputs: Sequence[ir.Value], **attributes: object) -> ir.Value:
            return self.node(op_type, inputs, f"{prefix}/{op_type}_{len(self._graph)}", **attributes)

        flat = hidden_states
        reshaped = rank != 2 and any(isinstance(matrix, WeightRef) for matrix in matrices)
        if reshaped:
            width = next(matrix.shape[1] for matrix in matrices if isinstance(matrix, WeightRef))
            flat = node("Reshape", [hidden_states, self.constant(np.array([-1, width], np.int64))])
        products = [
            node("Gemm", [flat, self.weight(matrix)], transB=1)
            if isinstance(matrix, WeightRef)
            else self._integer_product(prefix, flat, matrix)
            for matrix in matrices
        ]
        joined = products[0] if len(products) == 1 else node("Concat", products, axis=-1)
        if not reshaped:
            return joined
        wide = sum(_out_features(matrix) for matrix in matrices)
        leading = node("Shape", [hidden_states], start=0, end=-1)
        shape = node("Concat", [leading, self.constant(np.array([wide], np.int64))], axis=0)
        return node("Reshape", [joined, shape])

    def _check_products(self, matrix: ir.Value, ref: WeightRef, prefix: str) -> None:
        """ExportError where a template reads a matrix otherwise than in products over its inputs. `ref` is how the
        template has it."""
        in_first = self._store.in_first(ref)
        if not all(use.idx == 1 and _multiplies(use.node, in_first) for use in matrix.uses()):
            raise ExportError(
                f"{self.name}: {prefix} reads {' + '.join(ref.names)}, which is stored as integers, not in products only"
            )

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


def _out_features(matrix: IntegerRef | WeightRef) -> int:
    return matrix.shape[0] if isinstance(matrix, WeightRef) else matrix.integers.shape[1]


def _multiplies(node: ir.Node, in_first: bool) -> bool:
    """Whether a node multiplies by its second input, [in, out] where `in_first`, else [out, in], and adds a bias at most."""
    if node.op_type == "MatMul":
        return in_first
    usual = {"transA": 0, "transB": 0 if in_first else 1, "alpha": 1.0, "beta": 1.0}
    given = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}
    given |= {name: attribute.value for name, attribute in node.attributes.items()}
    return node.op_type == "Gemm" and given == usual
