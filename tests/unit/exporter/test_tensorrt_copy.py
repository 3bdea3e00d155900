"""The TensorRT copy of a graph: types, islands, frozen sizes, and the numbers it computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from vlmexport.exporter.graphs.retype import retype
from vlmexport.exporter.tensorrt import graph_copy, load_tensorrt
from vlmexport.exporter.tensorrt.graph_copy import CopyOptions, copy_graph
from vlmexport.exporter.tensorrt.network import parse
from vlmexport.runtime.common.errors import ExportError

from tests.support.onnx_session import onnx_session

SIZES = {
    "batch": 1,
    "width": 3,
    "cache": 20,
    "source": 9,
    "rows": 2,
    "span": 3,
    "distances": 21,
    "sources": 4,
}


def _feeds(graph: dict, rng: np.random.Generator) -> dict[str, np.ndarray]:
    feeds = {}
    for value in graph["inputs"]:
        shape = [SIZES.get(d, d) for d in value["shape"]]
        if value["dtype"] == "bool":
            feeds[value["name"]] = np.ones(shape, bool)
        elif value["name"] == "write_indices":
            feeds[value["name"]] = np.array([7], np.int64)
        elif value["dtype"] == "int64":
            feeds[value["name"]] = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) % 3
        else:
            feeds[value["name"]] = rng.standard_normal(shape, np.float32)
    return feeds


@pytest.mark.parametrize("name", ["llama", "blip2-t5"])
@pytest.mark.parametrize("wide", [False, True])
def test_float16_copies_compute_the_same(
    tiny_bundle: Callable, tmp_path: Path, name: str, wide: bool
) -> None:
    bundle = tiny_bundle(name)[0]
    graphs = json.loads((bundle / "manifest.json").read_text("utf-8"))["graphs"]
    rng = np.random.default_rng(0)
    for graph in graphs.values():
        feeds = _feeds(graph, rng)
        expected = dict(
            zip(
                [o["name"] for o in graph["outputs"]],
                onnx_session(bundle / graph["file"]).run(None, feeds),
                strict=True,
            )
        )
        copied = copy_graph(
            bundle / graph["file"], tmp_path, CopyOptions("float16", SIZES["cache"], wide_residual=wide)
        )
        session = onnx_session(copied.path)
        narrow = {
            i.name: feeds[i.name].astype(np.float16) if i.type == "tensor(float16)" else feeds[i.name]
            for i in session.get_inputs()
        }
        found = dict(zip([o.name for o in session.get_outputs()], session.run(None, narrow), strict=True))
        for output, value in expected.items():
            value = value.astype(np.float32)  # a mask may be boolean
            scale = max(1.0, np.abs(value).max())
            assert np.abs(found[output].astype(np.float32) - value).max() / scale < 0.03, (
                graph["file"],
                output,
            )
        if "logits" in found:
            assert (found["best"] == found["logits"].argmax(-1)).all() and found["finite"].all()
            assert found["logits"].dtype == np.float32
        for tensor in (t for t in session.get_inputs() if t.name.startswith("key_cache")):
            assert tensor.type == "tensor(float16)" and tensor.shape[2] == SIZES["cache"]


def test_the_copy_leaves_the_bundle_alone_and_halves_weights(
    tiny_bundle: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny_bundle("llama")[0]
    before = {p.name: p.read_bytes() for p in bundle.iterdir()}
    copied = copy_graph(bundle / "segment.0.onnx", tmp_path, CopyOptions("bfloat16", 32))
    same = copy_graph(bundle / "segment.0.onnx", tmp_path / "wide", CopyOptions("float32", 32))
    assert {p.name: p.read_bytes() for p in bundle.iterdir()} == before
    assert 0.49 < copied.weight_bytes / same.weight_bytes < 0.55  # norms stay float32
    monkeypatch.setattr(graph_copy, "CHUNK", 1000)
    copy_graph(bundle / "segment.0.onnx", tmp_path / "pieces", CopyOptions("bfloat16", 32))
    assert (tmp_path / "pieces/segment.0.data").read_bytes() == (tmp_path / "segment.0.data").read_bytes()


def test_norms_and_rotary_angles_stay_float32(tiny_bundle: Callable, tmp_path: Path) -> None:
    bundle = tiny_bundle("llama")[0]
    copied = copy_graph(bundle / "segment.0.onnx", tmp_path, CopyOptions("float16", 32))
    model = onnx.load(str(copied.path), load_external_data=False)
    makers = {o: n for n in model.graph.node for o in n.output}
    weights = {t.name: t.data_type for t in model.graph.initializer}
    angles = [n for n in model.graph.node if n.op_type in ("Sin", "Cos")]
    norms = [n for n in model.graph.node if n.op_type == "RMSNormalization"]
    assert angles and norms
    assert all(weights[n.input[1]] == TensorProto.FLOAT for n in norms)
    seen = {i for n in angles for i in n.input}
    while seen:
        name = seen.pop()
        if name in weights and weights[name] != TensorProto.INT64:
            assert weights[name] == TensorProto.FLOAT
        node = makers.get(name)
        if node is not None:
            assert not (node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT16)
            seen |= set(node.input)


def _toy(weight: np.ndarray) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "toy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def test_a_weight_beyond_float16_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.onnx"
    onnx.save(_toy(np.full((2, 2), 7e4, np.float32)), path)
    with pytest.raises(
        ExportError, match=r"weight w reaches 7e\+04, beyond float16; use --plan-precision bfloat16"
    ):
        copy_graph(path, tmp_path / "copy", CopyOptions("float16", 8))
    copy_graph(path, tmp_path / "copy", CopyOptions("bfloat16", 8))


def test_weights_are_rounded_to_the_nearest_bfloat16(tmp_path: Path) -> None:
    weight = np.array([[1 + 3 / 256, 1 + 5 / 256], [-0.1, 1e-3]], np.float32)  # two ties, to even
    onnx.save(_toy(weight), tmp_path / "toy.onnx")
    copied = copy_graph(tmp_path / "toy.onnx", tmp_path / "copy", CopyOptions("bfloat16", 8))
    (stored,) = onnx.load(str(copied.path)).graph.initializer
    found = numpy_helper.to_array(stored).astype(np.float32)
    assert np.array_equal(found, torch.from_numpy(weight).bfloat16().float().numpy())


def test_value_used_in_two_types_is_cast_once() -> None:
    model = _toy(np.eye(2, dtype=np.float32))
    nodes = model.graph.node
    nodes.extend(
        [
            helper.make_node("Exp", ["x"], ["e"]),
            helper.make_node("Log", ["x"], ["l"]),
            helper.make_node("Add", ["e", "l"], ["s"]),
        ]
    )
    model.graph.output.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, ["batch", 2]))
    retype(model, "float16")
    casts = [n for n in model.graph.node if n.op_type == "Cast" and n.input[0] == "x"]
    assert len(casts) == 1
    onnx.checker.check_model(model)


def test_an_unread_input_fails(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_libs")
    model = _toy(np.eye(2, dtype=np.float32))
    model.graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]))
    path = tmp_path / "toy.onnx"
    onnx.save(model, path)
    with pytest.raises(ExportError, match=r"drops the input 'lengths' of toy\.onnx"):
        parse(load_tensorrt(), path)


def test_an_operator_that_tensorrt_lacks_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_libs")
    graph = helper.make_graph(
        [helper.make_node("Unique", ["x"], ["y"])],
        "toy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    path = tmp_path / "odd.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10), path)
    with pytest.raises(ExportError, match=r"cannot parse odd\.onnx: .*Unique"):
        parse(load_tensorrt(), path)


def test_the_head_says_which_token_is_best_and_whether_it_is_a_number(tmp_path: Path) -> None:
    rows = np.array(
        [[1, 5, 5, 2], [1, np.nan, 9, 2], [1, 2, np.inf, 9], [-np.inf, 3, 1, 0], [-np.inf] * 4], np.float32
    )
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in ("given", "logits")
    ]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["given"], ["logits"])], "head", *([v] for v in values)
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    (tmp_path / "head.onnx").write_bytes(model.SerializeToString())
    for lowering in ("native", "portable"):
        options = CopyOptions("float32", 8, lowering=lowering)
        copied = copy_graph(tmp_path / "head.onnx", tmp_path / lowering, options)
        _, best, finite = onnx_session(copied.path).run(None, {"given": rows})
        assert best.dtype == np.int64 and best.tolist() == [1, 1, 2, 1, 0], lowering
        assert finite.tolist() == [True, False, False, True, False], lowering
