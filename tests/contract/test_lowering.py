"""The portable lowering: every graph of every family computes what it computed, in operators that TensorRT 10.3 has."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from vlmexport.exporter.lowering import OPSET, TENSORRT_10_3, lower, lower_capped
from vlmexport.exporter.lowering.attention import Attentions
from vlmexport.exporter.lowering.opset import refusal
from vlmexport.exporter.lowering.single import RULES
from vlmexport.exporter.tensorrt.graph_copy import CopyOptions, copy_graph
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.bundle.operators import OPERATORS
from vlmexport.runtime.common.errors import ExportError
from vlmexport.runtime.graphs.values import CONV_SLOTS, attention_masks, caches

from tests.support import lowered_runs
from tests.support.lowered_runs import COMMIT, GARBAGE, PASSES, ran
from tests.support.onnx_session import onnx_session
from tests.support.pairs import fast
from tests.support.rig import FAMILIES, RELATIVE
from tests.support.tiny_bundles import TinyBundle

ALL = [*FAMILIES, *(f"{family}-two-cuts" for family in FAMILIES)]


def models(tiny: TinyBundle) -> Iterator[tuple[str, ir.Model]]:
    """Every graph of a bundle, in both forms where it has two."""
    for info in tiny.bundle.manifest.graphs.values():
        for file in filter(None, (info.file, info.float32)):
            yield file, ir.from_proto(onnx.load(str(tiny.path / file), load_external_data=False))


def check(model: ir.Model, path: Path) -> None:
    """ONNX accepts it in all detail, and TensorRT's parser knows what is in it."""
    proto = ir.to_proto(model)
    path.write_bytes(proto.SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", OPSET)]
    assert {node.op_type for node in proto.graph.node} <= TENSORRT_10_3


@pytest.mark.parametrize("name", ALL)
def test_every_graph_is_valid_and_of_listed_operators(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, name: str
) -> None:
    tiny = tiny_bundle(name)
    (tmp_path / "weights.bin").touch()  # the checker asks whether it is there
    for file, model in models(tiny):
        before = ir.to_proto(model).SerializeToString()
        lowered = lower(model)
        assert ir.to_proto(model).SerializeToString() == before, "lowering changes a copy"
        check(lowered, tmp_path / file)
        read = {value for node in lowered.graph for value in node.inputs}
        assert set(lowered.graph.inputs) <= read, file
        old, new = [v.name for v in model.graph.inputs], [v.name for v in lowered.graph.inputs]
        added = {"new_mask", "new_sliding_mask"}
        gone = set() if CONV_SLOTS in old else {"write_indices"}  # a convolution's rows are old or new by it
        assert [n for n in old if n not in gone] == [n for n in new if n not in added], file
        caches = {value.name: value for value in model.graph.inputs}
        for value in lowered.graph.outputs:
            if value.name.startswith("new_"):
                cache = caches[value.name.replace("new_", "").replace(".", "_cache.")]
                assert value.dtype == cache.dtype
                assert value.shape and cache.shape and list(value.shape)[1::2] == list(cache.shape)[1::2]


@fast(("name",), [(name,) for name in ALL], {(name,) for name in (*FAMILIES, "llama-two-cuts")})
def test_every_graph_computes_the_same(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, name: str
) -> None:
    tiny = tiny_bundle(name)
    manifest = as_float32(tiny.bundle.manifest)
    compared = set()
    for graph, info in manifest.graphs.items():
        own = onnx_session(tiny.path / info.file)
        other = onnx_session(lowered_runs.lowered_file(tiny.path, info.file, tmp_path))
        for what, run in PASSES.items() if info.role == "segment" else [("all", COMMIT)]:
            given = lowered_runs.inputs(manifest, tiny, info, run, len(compared))
            want = lowered_runs.lowered_outputs(ran(own, given), run)
            got = ran(other, lowered_runs.lowered_inputs(given, run))
            assert want.keys() == got.keys()
            for output, array in want.items():
                where = f"{graph}, {what}: {output}"
                assert got[output].shape == array.shape, where
                if array.dtype in (np.int64, np.bool_):
                    assert np.array_equal(got[output], array), where
                    continue
                worst, scale = np.abs(got[output] - array).max(), np.abs(array).max()
                assert worst <= RELATIVE * scale, f"{where} differs by {worst:.2e}, scale {scale:.1f}"
                compared.add((graph, output))
    assert len(compared) >= 2 * len(caches(manifest, range(manifest.decoder.num_layers)))


@pytest.mark.parametrize("cap", [None, 0.0])
def test_a_soft_cap_left_out_is_found(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap: float | None
) -> None:
    """Scores are bounded before the mask hides some; without the bound the rows are others."""
    tiny = tiny_bundle("paligemma2")
    info = tiny.bundle.manifest.graphs["segment.1"]
    if cap is not None:
        scores = Attentions._scores
        monkeypatch.setattr(Attentions, "_scores", lambda self, *given: scores(self, *given[:-1], cap))
    own = onnx_session(tiny.path / info.file)
    other = onnx_session(lowered_runs.lowered_file(tiny.path, info.file, tmp_path))
    run = PASSES["tree"]
    given = lowered_runs.inputs(tiny.bundle.manifest, tiny, info, run, 5)
    want = lowered_runs.lowered_outputs(ran(own, given), run)["hidden_out"]
    got = ran(other, lowered_runs.lowered_inputs(given, run))["hidden_out"]
    far = np.abs(got - want).max() / np.abs(want).max()
    assert far <= RELATIVE if cap is None else far > 1000 * RELATIVE, far


@pytest.mark.parametrize("what", ["wide", "tree", "ragged trees"])
def test_native_plans_of_soft_caps_compute_the_same(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, what: str
) -> None:
    """TensorRT's attention has no soft cap: that of a native copy is products, and its caches are updated in place."""
    tiny = tiny_bundle("paligemma2")
    info = tiny.bundle.manifest.graphs["segment.0"]
    os.link(tiny.path / "weights.bin", tmp_path / "weights.bin")
    model = lower_capped(ir.from_proto(onnx.load(str(tiny.path / info.file), load_external_data=False)))
    kinds = [node.op_type for node in model.graph]
    assert "Attention" not in kinds and kinds.count("TensorScatter") == 2
    ir.save(model, tmp_path / "copy.onnx")
    given = lowered_runs.inputs(tiny.bundle.manifest, tiny, info, PASSES[what], 6)
    want = ran(onnx_session(tiny.path / info.file), given)
    got = ran(onnx_session(tmp_path / "copy.onnx"), given)
    for output, array in want.items():
        assert np.abs(got[output] - array).max() <= RELATIVE * np.abs(array).max(), output


@pytest.mark.parametrize("name", FAMILIES)
def test_stale_rows_do_not_matter(tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, name: str) -> None:
    """Bit for bit: what a slot from the first new row on holds has no weight at all."""
    tiny = tiny_bundle(name)
    manifest = as_float32(tiny.bundle.manifest)
    for graph in manifest.segments:
        info = manifest.graphs[graph]
        lowered = onnx_session(lowered_runs.lowered_file(tiny.path, info.file, tmp_path))
        for what, run in PASSES.items():
            given = lowered_runs.lowered_inputs(lowered_runs.inputs(manifest, tiny, info, run, 3), run)
            found = []
            for number in (0.0, GARBAGE, -7.0):
                for name, array in given.items():
                    if "_cache." in name:
                        lowered_runs.spoil(array, run.starts, number)
                found.append(ran(lowered, given))
            for other in found[1:]:
                assert all(np.array_equal(found[0][output], other[output]) for output in other), (graph, what)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("t5", "float16"), ("llama", "float16"), ("blip2-opt", "bfloat16"), ("qwen2.5-vl", "bfloat16")],
)
def test_copies_of_narrow_types_are_lowered_in_their_types(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, name: str, precision: str
) -> None:
    """As a plan of another precision takes them; softmax is in float32, and Conv, which opset 17 has not in bfloat16."""
    tiny = tiny_bundle(name)
    softmaxes = convs = 0
    for graph, info in tiny.bundle.manifest.graphs.items():
        options = CopyOptions(precision, 180, wide_residual=name == "t5", lowering="portable")
        copied = copy_graph(tiny.path / info.file, tmp_path, options)
        onnx.checker.check_model(str(copied.path), full_check=True)
        model = onnx.shape_inference.infer_shapes(onnx.load(str(copied.path), load_external_data=False))
        values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
        types = {value.name: value.type.tensor_type.elem_type for value in values}
        for node in model.graph.node:
            assert node.op_type in TENSORRT_10_3, graph
            wide = node.op_type == "Softmax" or (node.op_type == "Conv" and precision == "bfloat16")
            assert not wide or types[node.input[0]] == TensorProto.FLOAT, (graph, node.name)
            softmaxes += node.op_type == "Softmax"
            convs += node.op_type == "Conv"
        for value in model.graph.input:
            if "_cache." in value.name:
                narrow = TensorProto.FLOAT16 if precision == "float16" else TensorProto.BFLOAT16
                assert value.type.tensor_type.elem_type == narrow
                assert value.type.tensor_type.shape.dim[2].dim_value == 180
    decoder = tiny.bundle.manifest.decoder
    assert softmaxes >= sum(bool(attention_masks(decoder, [layer])) for layer in range(decoder.num_layers))
    assert (convs > 0) == (name in ("t5", "blip2-opt"))


def test_float16_graphs_differ_by_rounding_only(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path
) -> None:
    """As far from float32 as the float16 graphs of the bundle are; ONNX Runtime computes both as they are stored."""
    tiny = tiny_bundle("t5-float16")
    manifest, wide = tiny.bundle.manifest, as_float32(tiny.bundle.manifest)
    for graph in manifest.segments:
        info = manifest.graphs[graph]
        exact, own = (onnx_session(tiny.path / each.graphs[graph].file) for each in (wide, manifest))
        lowered = onnx_session(lowered_runs.lowered_file(tiny.path, info.file, tmp_path))
        for what, run in PASSES.items():
            given = lowered_runs.inputs(manifest, tiny, info, run, 4)
            kinds = {value.name: value.dtype for value in wide.graphs[graph].inputs}
            widest = {k: v.astype(np.float32) if kinds[k] == "float32" else v for k, v in given.items()}
            want = lowered_runs.lowered_outputs(ran(exact, widest), run)
            native = lowered_runs.lowered_outputs(ran(own, given), run)
            got = ran(lowered, lowered_runs.lowered_inputs(given, run))
            for output, array in want.items():
                rounding = np.abs(native[output].astype(np.float32) - array).max()
                worst = np.abs(got[output].astype(np.float32) - array).max()
                assert 0 < worst <= 2 * rounding, (
                    f"{graph}, {what}: {output} {worst:.2e}, native {rounding:.2e}"
                )


# --- single operators ---


def test_every_operator_of_a_bundle_has_a_lowering() -> None:
    # Integers of drafts are refused before anything is lowered.
    assert OPERATORS - TENSORRT_10_3 - RULES.keys() == {"Attention", "DequantizeLinear", "TensorScatter"}


def toy(
    nodes: list[onnx.NodeProto], inputs: dict[str, list], outputs: dict[str, list], **integers: list[int]
) -> ir.Model:
    """A float32 graph of opset 24 over named inputs; `attn_mask` is what its shape says, integers are constants."""
    made = helper.make_graph(
        nodes,
        "toy",
        [
            helper.make_tensor_value_info(
                n, TensorProto.INT64 if n == "write_indices" else TensorProto.FLOAT, s
            )
            for n, s in inputs.items()
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
        [helper.make_tensor(n, TensorProto.INT64, [len(v)], v) for n, v in integers.items()],
    )
    return ir.from_proto(helper.make_model(made, opset_imports=[helper.make_opsetid("", 24)], ir_version=10))


def both(model: ir.Model, given: dict[str, np.ndarray], folder: Path) -> tuple[dict, dict]:
    """What ONNX Runtime makes of a graph and of its lowered copy."""
    check(lower(model), folder / "lowered.onnx")
    (folder / "toy.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    return ran(onnx_session(folder / "toy.onnx"), given), ran(onnx_session(folder / "lowered.onnx"), given)


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Gelu", ["x"], ["y"]),
        helper.make_node("Gelu", ["x"], ["y"], approximate="tanh"),
        helper.make_node("Mish", ["x"], ["y"]),
        helper.make_node("HardSwish", ["x"], ["y"]),
        helper.make_node("ReduceLogSumExp", ["x", "axes"], ["y"], keepdims=1),
        helper.make_node("Split", ["x"], ["y", "z"], axis=1, num_outputs=2),
    ],
    ids=["gelu", "gelu by tanh", "mish", "hard swish", "log sum exp", "split"],
)
def test_single_operators(node: onnx.NodeProto, tmp_path: Path) -> None:
    rows = 6 if node.op_type != "ReduceLogSumExp" else 1
    shape = ["n", 3 if node.op_type == "Split" else rows]
    axes = {"axes": [-1]} if len(node.input) > 1 else {}
    model = toy([node], {"x": ["n", 6]}, dict.fromkeys(node.output, shape), **axes)
    x = 4 * np.random.default_rng(0).standard_normal((40, 6), np.float32)
    want, got = both(model, {"x": x}, tmp_path)
    for output, array in want.items():
        assert np.abs(got[output] - array).max() <= 1e-6 * np.abs(array).max()


def test_the_logarithm_of_a_sum_does_not_overflow(tmp_path: Path) -> None:
    """TensorRT's parser makes exp, sum and log of the operator: 89 is infinite there, and −200 the logarithm of 0."""
    node = helper.make_node("ReduceLogSumExp", ["x", "axes"], ["y"], keepdims=0)
    lowered = lower(toy([node], {"x": ["n", 2]}, {"y": ["n"]}, axes=[-1]))
    check(lowered, tmp_path / "lowered.onnx")
    x = np.array([[500.0, 500.0], [-200.0, -200.0]], np.float32)
    found = ran(onnx_session(tmp_path / "lowered.onnx"), {"x": x})["y"]
    assert np.allclose(found, x[:, 0] + np.log(2), rtol=1e-6)


@pytest.mark.parametrize("heads", [1, 6])
def test_groups_of_queries_share_a_head(heads: int, tmp_path: Path) -> None:
    """Six heads of queries over two of keys and values, with one mask or one per head, which no family has yet."""
    cache, mask = ["batch", 2, "cache", 8], ["batch", heads, "width", "cache"]
    rows = ["batch", 2, "width", 8]
    nodes = [
        helper.make_node("TensorScatter", ["key_cache.0", "k", "write_indices"], ["updated_key_cache.0"], axis=2),
        helper.make_node("TensorScatter", ["value_cache.0", "v", "write_indices"], ["updated_value_cache.0"], axis=2),
        helper.make_node("Attention", ["q", "updated_key_cache.0", "updated_value_cache.0", "attn_mask"], ["y"]),
    ]  # fmt: skip
    inputs = {"q": ["batch", 6, "width", 8], "k": rows, "v": rows, "key_cache.0": cache, "value_cache.0": cache,
              "write_indices": ["batch"], "attn_mask": mask}  # fmt: skip
    outputs = {"y": inputs["q"], "updated_key_cache.0": cache, "updated_value_cache.0": cache}
    model = toy(nodes, inputs, outputs)
    rng, run = np.random.default_rng(5), lowered_runs.Pass((3, 17), 4, cache=32)
    sizes: dict[str | int, int] = {"batch": 2, "width": 4, "cache": 32, 8: 8, 6: 6, 2: 2, 1: 1}
    given = {n: rng.standard_normal([sizes[d] for d in s], np.float32) for n, s in inputs.items()} | {
        "write_indices": np.array(run.starts)
    }
    slots = np.array(run.starts)[:, None, None, None] + np.arange(4)[:, None]
    given["attn_mask"][np.broadcast_to(np.arange(32) > slots, given["attn_mask"].shape)] = (
        np.finfo(np.float32).min / 2
    )
    check(lower(model), tmp_path / "lowered.onnx")
    (tmp_path / "toy.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    want = lowered_runs.lowered_outputs(ran(onnx_session(tmp_path / "toy.onnx"), given), run)
    got = ran(onnx_session(tmp_path / "lowered.onnx"), lowered_runs.lowered_inputs(given, run))
    assert got.keys() == want.keys() == {"y", "new_key.0", "new_value.0"}
    for name, array in want.items():
        assert np.abs(got[name] - array).max() <= 1e-6 * np.abs(array).max()


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (helper.make_node("Attention", ["x", "x", "x"], ["y"], is_causal=1), "Attention .* has the attribute is_causal"),
        (helper.make_node("Attention", ["x", "x", "x", "", "x", "x"], ["y"]), "takes other inputs than queries"),
        (helper.make_node("RotaryEmbedding", ["x", "a", "a"], ["y"], interleaved=1), "RotaryEmbedding .* of another kind"),
        (helper.make_node("RMSNormalization", ["x", "a"], ["y"], axis=1), "not over the last dimension"),
        (helper.make_node("Swish", ["x"], ["y"]), "the operator Swish .* has no lowering for TensorRT 10.3"),
        (helper.make_node("ReduceLogSumExp", ["x", "write_indices"], ["y"]), "input 1 of ReduceLogSumExp .* a constant"),
    ],
)  # fmt: skip
def test_what_has_no_lowering_is_refused(node: onnx.NodeProto, said: str) -> None:
    node.name = "here"
    shapes = {"x": [1, 2, 3, 4], "a": [1, 3, 2], "write_indices": [1]}
    inputs = {n: s for n, s in shapes.items() if n in node.input}
    with pytest.raises(ExportError, match=said) as error:
        lower(toy([node], inputs, {"y": [1, 2, 3, 4]}))
    assert not re.search(r"\n", str(error.value))


def test_a_cache_that_something_else_reads_is_refused() -> None:
    cache, rows = ["batch", 2, "cache", 8], ["batch", 2, "width", 8]
    inputs = {"key_cache.0": cache, "k": rows, "write_indices": ["batch"]}
    update = helper.make_node(
        "TensorScatter", ["key_cache.0", "k", "write_indices"], ["updated_key_cache.0"], axis=2
    )
    model = toy(
        [update, helper.make_node("Relu", ["updated_key_cache.0"], ["y"])],
        inputs,
        {"updated_key_cache.0": cache, "y": cache},
    )
    with pytest.raises(ExportError, match=r"Relu reads the updated cache 'updated_key_cache\.0'"):
        lower(model)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (ir.node("TopK", [(x := ir.Value(name="x")), ir.Value(name="k")], num_outputs=2), "must rank a constant number below 3840"),
        (ir.node("Squeeze", [x, ir.Value(name="axes")]), "must have constant axes"),
        (ir.node("LayerNormalization", [x, x], num_outputs=3), "must have one output"),
        (ir.node("ScatterElements", [x, x, x], {"reduction": "add"}), "must replace numbers"),
        (ir.node("ScatterElements", [x, x, x], {"reduction": "none"}), None),
        (ir.node("ReduceSum", [x]), None),
    ],
)  # fmt: skip
def test_what_tensorrt_10_3_restricts_is_refused(node: ir.Node, reason: str | None) -> None:
    found = refusal(node)
    assert (found is None) if reason is None else (found is not None and reason in found)
