"""Queries, keys and values of one product: fewer nodes, the same numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from vlmexport.exporter.graphs.merge_heads import merge_heads

from tests.support.onnx_session import onnx_session

BATCH, WIDTH, SIZE = 2, 3, 8


def layer(
    counts: list[int], rotated: int, *, other_angles: bool = False, sizes: int = SIZE
) -> onnx.ModelProto:
    """The head of an attention as it is traced: Split, a Reshape and a Transpose for each part, rotations of the first ones."""
    total = sum(counts)
    initializers = [numpy_helper.from_array(np.array([n * SIZE for n in counts], np.int64), "parts")]
    nodes = [helper.make_node("Split", ["x", "parts"], [f"p{i}" for i in range(len(counts))], axis=-1)]
    outputs = []
    for i, count in enumerate(counts):
        size = sizes if i else SIZE
        target = np.array([0, 0, count * SIZE // size, size], np.int64)
        initializers.append(numpy_helper.from_array(target, f"shape{i}"))
        nodes.append(helper.make_node("Reshape", [f"p{i}", f"shape{i}"], [f"v{i}"]))
        out = f"t{i}" if i < rotated else f"o{i}"
        nodes.append(helper.make_node("Transpose", [f"v{i}"], [out], perm=[0, 2, 1, 3]))
        if i < rotated:
            cos = "sin" if other_angles and i else "cos"
            nodes.append(helper.make_node("RotaryEmbedding", [f"t{i}", cos, "sin"], [f"o{i}"]))
        outputs.append(helper.make_tensor_value_info(f"o{i}", TensorProto.FLOAT, None))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (
            ("x", [BATCH, WIDTH, total * SIZE]),
            ("cos", [BATCH, WIDTH, SIZE // 2]),
            ("sin", [BATCH, WIDTH, SIZE // 2]),
        )
    ]
    # What nothing reads would not be merged: each output is read by one node more, as a cache reads its keys.
    for i in range(len(counts)):
        outputs[i].name = f"y{i}"
        nodes.append(helper.make_node("Neg", [f"o{i}"], [f"y{i}"]))
    graph = helper.make_graph(nodes, "heads", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def merged(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = ir.from_proto(model)
    merge_heads(copy.graph)
    return ir.to_proto(copy)


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    feeds = {
        value.name: rng.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim]).astype(
            np.float32
        )
        for value in model.graph.input
    }
    session = onnx_session(model.SerializeToString())
    used = {i.name for i in session.get_inputs()}
    return session.run(None, {n: v for n, v in feeds.items() if n in used})


def kinds(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("counts", [[4, 2, 2], [3, 3, 3], [2, 2]])
@pytest.mark.parametrize("rotated", [0, 2])
def test_numbers_stay_and_nodes_go(counts: list[int], rotated: int) -> None:
    before = layer(counts, rotated)
    after = merged(before)
    for one, other in zip(run(before), run(after), strict=True):
        np.testing.assert_array_equal(one, other)
    expected = {"Reshape": 1, "Transpose": 1, "RotaryEmbedding": int(rotated > 0)}
    assert {name: kinds(after)[name] for name in expected} == expected
    assert len(after.graph.node) < len(before.graph.node)


def test_other_angles_are_rotated_apart() -> None:
    before = layer([4, 2, 2], 2, other_angles=True)
    after = merged(before)
    assert kinds(after)["RotaryEmbedding"] == 2 and kinds(after)["Transpose"] == 1
    for one, other in zip(run(before), run(after), strict=True):
        np.testing.assert_array_equal(one, other)


def test_heads_of_other_sizes_stay() -> None:
    before = layer([4, 2, 2], 0, sizes=SIZE // 2)
    after = merged(before)
    assert kinds(after) == kinds(before)
