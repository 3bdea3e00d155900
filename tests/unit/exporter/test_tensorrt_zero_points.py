"""Integer weights with zero points in TensorRT's copy of a graph: the same product, and no zero points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.tensorrt.compile import compile_bundle
from vlmexport.exporter.tensorrt.graph_copy import CopyOptions, GraphCopy, copy_graph
from vlmexport.exporter.tensorrt.options import PlanOptions, resolve
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import ExportError
from vlmexport.runtime.engines.onnxruntime import fold_integers, use_global_pool

from tests.support import tiny_models
from tests.support.quantized_checkpoints import write_quantized
from tests.support.segment_feeds import segment_feeds

RNG = np.random.default_rng(2)
BLOCKS, BLOCK, OUT = 3, 32, 8
LIMITS: dict[int, tuple[int, int]] = {TensorProto.INT8: (-128, 127), TensorProto.INT4: (-8, 7)}


def _toy(folder: Path, kind: int, external: bool, scales: np.ndarray | None = None) -> Path:
    """Two products of the same rows [batch, 2, in] with matrices of integers and zero points."""
    low, high = LIMITS[kind]
    nodes, tensors = [], []
    for name in ("a", "b"):
        own = RNG.uniform(0.01, 0.02, (BLOCKS, OUT)).astype(np.float32) if scales is None else scales
        shapes = {"q": (BLOCKS * BLOCK, OUT), "z": (BLOCKS, OUT)}
        parts = {k: RNG.integers(low, high, shape, endpoint=True) for k, shape in shapes.items()}
        tensors += [
            helper.make_tensor(f"{name}{k}", kind, part.shape, part.ravel()) for k, part in parts.items()
        ]
        tensors.append(numpy_helper.from_array(own, f"{name}s"))
        inputs = [f"{name}q", f"{name}s", f"{name}z"]
        nodes.append(
            helper.make_node(
                "DequantizeLinear", inputs, [f"{name}m"], name=f"{name}/DQ", axis=0, block_size=BLOCK
            )
        )
        nodes.append(helper.make_node("MatMul", ["x", f"{name}m"], [f"{name}y"], name=f"{name}/product"))
    graph = helper.make_graph(
        nodes,
        "toy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2, BLOCKS * BLOCK])],
        [helper.make_tensor_value_info(f"{n}y", TensorProto.FLOAT, ["batch", 2, OUT]) for n in "ab"],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    folder.mkdir()
    path = folder / "toy.onnx"
    onnx.save(
        model, str(path), save_as_external_data=external, location="weights.bin", size_threshold=0
    ) if external else path.write_bytes(model.SerializeToString())
    return path


def _run(path: Path, feeds: dict[str, np.ndarray]) -> Any:
    use_global_pool()
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 4
    fold_integers(options)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feeds)


def _zero_points(path: Path) -> int:
    return sum(
        node.op_type == "DequantizeLinear" and len(node.input) > 2
        for node in onnx.load(str(path), load_external_data=False).graph.node
    )


@pytest.mark.parametrize("kind", [TensorProto.INT8, TensorProto.INT4])
@pytest.mark.parametrize("external", [False, True])
def test_the_product_is_the_same_without_zero_points(tmp_path: Path, kind: int, external: bool) -> None:
    source = _toy(tmp_path / "source", kind, external)
    copied = copy_graph(source, tmp_path / "copy", CopyOptions("float32", 8))
    assert _zero_points(source) == 2 and _zero_points(copied.path) == 0
    x = RNG.standard_normal((3, 2, BLOCKS * BLOCK)).astype(np.float32)
    for got, want in zip(_run(copied.path, {"x": x}), _run(source, {"x": x}), strict=True):
        assert np.abs(want).max() > 1
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    nodes = [node.op_type for node in onnx.load(str(copied.path)).graph.node]
    assert nodes.count("ReduceSum") == 1, "rows are summed up once for all their products"
    assert sorted(p.name for p in copied.path.parent.iterdir()) == ["toy.data", "toy.onnx"] or not external


def test_what_reads_a_matrix_otherwise_is_named(tmp_path: Path) -> None:
    source = _toy(tmp_path / "source", TensorProto.INT8, external=False)
    model = onnx.load(str(source))
    model.graph.node.append(helper.make_node("Identity", ["am"], ["more"], name="reader"))
    source.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match=r"a/DQ: a matrix with zero points is read by .*"):
        copy_graph(source, tmp_path / "copy", CopyOptions("float32", 8))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gptq-act-order", "awq"])
def test_a_checkpoint_with_zero_points_gets_plans(tmp_path: Path, form: str) -> None:
    """Its segment: float32 rounding off in ONNX Runtime, and a plan of TensorRT."""
    plain = tiny_models.checkpoint("llama", tmp_path / "plain")
    write_quantized(plain, tmp_path / "quantized", form)
    bundle = tmp_path / "bundle"
    build_bundle(
        BuildRequest(
            model=str(tmp_path / "quantized"), output=bundle, drafts=["none"], parity=False, max_length=16
        )
    )
    manifest = Bundle.open(bundle).manifest
    (name,) = manifest.segments
    graph = manifest.graphs[name]
    capacity = 16 + manifest.limits.max_width
    feeds = segment_feeds(graph, capacity, RNG)
    copied: GraphCopy = copy_graph(bundle / graph.file, tmp_path / "copy", CopyOptions("float32", capacity))
    assert (
        _zero_points(bundle / graph.file) == {"awq": 8, "gptq-act-order": 14}[form]
        and _zero_points(copied.path) == 0
    )
    for got, want in zip(_run(copied.path, feeds), _run(bundle / graph.file, feeds), strict=True):
        assert np.abs(got - want).max() <= 1e-5 * max(1.0, float(np.abs(want).max()))
    pytest.importorskip("tensorrt_rtx_libs")
    report = compile_bundle(bundle, PlanOptions(target="sm86"))
    assert name in {plan["graph"] for plan in report.plans.entries}


def test_negative_scales_build(tmp_path: Path) -> None:
    """AutoRound writes them."""
    pytest.importorskip("tensorrt_rtx_libs")
    from vlmexport.exporter.tensorrt.builder import build_plan
    from vlmexport.exporter.tensorrt.profiles import Profile

    source = _toy(tmp_path / "source", TensorProto.INT4, False, np.full((BLOCKS, OUT), -0.5, np.float32))
    wanted = resolve(PlanOptions(target="sm86"))
    plan = build_plan(
        wanted.library,
        wanted.capability,
        source,
        tmp_path / "copy",
        CopyOptions("float16", 8),
        [Profile("all", {"batch": (1, 2, 4)})],
    )
    assert plan.bytes > 0
