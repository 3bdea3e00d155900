"""Integer weights with zero points as TensorRT takes them, which has none: `x·(q − z)s = x·(q s) − Σ_blocks (Σ x)·(z s)`.

The second product is exact and small: a row of sums has a number for each block of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ...runtime.common.errors import ExportError

FLOAT = TensorProto.FLOAT
INTEGER_TYPES = (TensorProto.INT8, TensorProto.INT4)


@dataclass(frozen=True)
class Asymmetric:
    """`DequantizeLinear` with zero points and the `MatMul` that multiplies `hidden_states` by it."""

    dequantize: onnx.NodeProto
    product: onnx.NodeProto
    block: int


def move_zero_points(
    model: onnx.ModelProto, origin: Path, target: Path, kinds: Mapping[str, int]
) -> dict[str, int]:
    """Takes the zero points out of every `DequantizeLinear` of `model`, in place, and subtracts what they did from the product.

    Args:
        origin: the folder of the graph's weights.
        target: a file for the matrices z·s, float32 [blocks, out], by whose full path initializers refer to them; it is
            written where there are any.
        kinds: initializer → element type that it will have.

    Returns the element types of new initializers: that of the scales. Raises ExportError where something else than a product
    reads such a matrix.
    """
    graph = model.graph
    matrices = {each.product.output[0]: each for each in _asymmetric(graph)}
    if not matrices:
        return {}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    ranks = _ranks(model)
    made: dict[str, int] = {}
    nodes: list[onnx.NodeProto] = []
    sums: dict[tuple[str, int], str] = {}
    with target.open("wb") as file:
        for node in graph.node:
            found = matrices.get(node.output[0])
            if found is None:
                nodes.append(node)
                continue
            _, scales, zero_points = found.dequantize.input
            del found.dequantize.input[2:]
            kind, name, rows = kinds[scales], node.output[0], node.input[0]
            moved = _read(tensors[zero_points], origin).astype(np.float32) * _read(tensors[scales], origin)
            graph.initializer.append(_stored(f"{zero_points}/moved", moved, file.tell(), target))
            file.write(moved.astype(np.float32).tobytes())
            made[f"{zero_points}/moved"] = kind
            if (rows, found.block) not in sums:
                if rows not in ranks:
                    raise ExportError(
                        f"{name}: the rank of {rows} is unknown, whose blocks are to be summed up"
                    )
                sums[rows, found.block] = _add_sums(nodes, graph, rows, ranks[rows], found.block, kind, made)
            node.output[0] = f"{name}/without_zero_points"
            nodes.append(node)
            for operator, inputs, output in (
                ("MatMul", [sums[rows, found.block], f"{zero_points}/moved"], f"{name}/of_zero_points"),
                ("Sub", [node.output[0], f"{name}/of_zero_points"], name),
            ):
                nodes.append(helper.make_node(operator, inputs, [output], name=f"{node.name}/{operator}"))
    del graph.node[:]
    graph.node.extend(nodes)
    return made


def _asymmetric(graph: onnx.GraphProto) -> Iterator[Asymmetric]:
    for node in graph.node:
        if node.op_type != "DequantizeLinear" or len(node.input) < 3 or not node.input[2]:
            continue
        readers = [other for other in graph.node if node.output[0] in other.input]
        for reader in readers:
            if reader.op_type != "MatMul" or reader.input[1] != node.output[0] or len(readers) != 1:
                raise ExportError(
                    f"{node.name}: a matrix with zero points is read by {reader.op_type} ({reader.name})"
                )
            block = next(a.i for a in node.attribute if a.name == "block_size")
            yield Asymmetric(node, reader, block)


def _add_sums(
    nodes: list[onnx.NodeProto],
    graph: onnx.GraphProto,
    rows: str,
    rank: int,
    block: int,
    kind: int,
    made: dict[str, int],
) -> str:
    """Adds nodes that sum up every `block` of numbers of `rows` [..., in], in float32; the name of [..., blocks]."""
    start = f"{rows}/sums_of_{block}"
    constants = {
        f"{start}/shape": np.array([0] * (rank - 1) + [-1, block], np.int64),
        f"{start}/axis": np.array([-1], np.int64),
    }
    for name, array in constants.items():
        graph.initializer.append(numpy_helper.from_array(array, name))
        made[name] = TensorProto.INT64
    last = f"{start}/wide"
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("Reshape", [rows, f"{start}/shape"], f"{start}/blocks", {}),
        ("Cast", [f"{start}/blocks"], f"{start}/wide_blocks", {"to": FLOAT}),
        ("ReduceSum", [f"{start}/wide_blocks", f"{start}/axis"], last, {"keepdims": 0}),
    ]
    if kind != FLOAT:
        last = start
        steps.append(("Cast", [f"{start}/wide"], last, {"to": kind}))
    for operator, inputs, output, attributes in steps:
        nodes.append(helper.make_node(operator, inputs, [output], name=f"{output}/{operator}", **attributes))
    return last


def _ranks(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model).graph
    return {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*inferred.input, *inferred.value_info, *inferred.output)
        if value.type.tensor_type.HasField("shape")
    }


def _read(tensor: onnx.TensorProto, origin: Path) -> np.ndarray:
    """An initializer's numbers, integers of 4 bits as int8."""
    if tensor.data_location != TensorProto.EXTERNAL:
        array = numpy_helper.to_array(tensor)
        return array.astype(np.int8) if tensor.data_type in INTEGER_TYPES else array
    places = {entry.key: entry.value for entry in tensor.external_data}
    count = math.prod(tensor.dims)
    packed = tensor.data_type == TensorProto.INT4
    array = np.fromfile(
        origin / places["location"],
        np.uint8 if packed else helper.tensor_dtype_to_np_dtype(tensor.data_type),
        -(-count // 2) if packed else count,
        offset=int(places.get("offset", 0)),
    )
    if packed:  # the first of two in the low half
        halves = np.stack([array & 15, array >> 4], 1).reshape(-1)[:count].astype(np.int8)
        array = np.where(halves > 7, halves - 16, halves)
    return array.reshape(tensor.dims)


def _stored(name: str, array: np.ndarray, offset: int, file: Path) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=FLOAT, dims=array.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", file.resolve()), ("offset", offset), ("length", 4 * array.size)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
