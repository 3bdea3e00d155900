"""The folded form of graphs whose heads of queries share key/value heads: it computes what the graph computes, and ONNX
Runtime's CUDA provider is given it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import compress, pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from vlmexport.exporter.graphs.gqa_fold import folded_form
from vlmexport.exporter.lowering.groups import Groups
from vlmexport.exporter.lowering.rewriter import size, typed
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.bundle.manifest import GraphInfo, Manifest
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.graphs.values import attention_masks

from tests.support import lossless, lowered_runs
from tests.support.engines.emulated import EmulatedCuda
from tests.support.lowered_runs import PASSES, lowered_outputs, ran
from tests.support.onnx_session import onnx_session
from tests.support.rig import FAMILIES, Rig
from tests.support.tiny_bundles import TinyBundle

Bundles = Callable[[str], TinyBundle]

UNGROUPED = ("t5", "t5-text", "t5-float16", "blip2-opt", "vit-gpt2")
"""Families whose targets have no groups; the layers of drafts have two key/value heads for four of queries everywhere."""

LAYERS = {"eagle", "eagle3", "vispec"}

CLOSE = {"log_probabilities": 5e-6}
USUAL = 1e-6
"""Of the largest value of an output; a logarithm is the small difference of a logit and the sum of all."""


def read(path: Path) -> ir.Model:
    return ir.from_proto(onnx.load(str(path), load_external_data=False))


def attentions(path: Path) -> Iterator[tuple[int, int]]:
    """Heads of queries and of keys of every attention in a file."""
    for node in typed(read(path)).graph:
        if node.op_type == "Attention":
            query, keys = (value.shape for value in node.inputs[:2] if value is not None)
            assert query is not None and keys is not None
            yield int(query[1]), int(keys[1])  # type: ignore[arg-type]


def folded(manifest: Manifest) -> dict[str, GraphInfo]:
    return {name: info for name, info in manifest.graphs.items() if info.folded is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_with_groups_have_the_form_and_no_others(tiny_bundle: Bundles, name: str) -> None:
    tiny = tiny_bundle(name)
    manifest = tiny.bundle.manifest
    grouped = manifest.decoder.num_kv_heads < manifest.decoder.num_heads
    assert grouped == (name not in UNGROUPED)
    for graph, info in manifest.graphs.items():
        groups = [heads for heads in attentions(tiny.path / info.file) if heads[0] != heads[1]]
        assert info.folded == (f"{graph}.folded.onnx" if groups else None), graph
        if info.folded is not None:
            path = tiny.path / info.folded
            assert all(heads == kv_heads for heads, kv_heads in attentions(path))
            assert len(list(attentions(path))) == len(list(attentions(tiny.path / info.file)))
            assert manifest.files[info.folded].bytes < 2 * manifest.files[info.file].bytes
    expected = LAYERS & manifest.graphs.keys()
    if grouped:
        cuts = pairwise(manifest.decoder.cuts)
        attending = [bool(attention_masks(manifest.decoder, range(*ends))) for ends in cuts]
        expected |= {*compress(manifest.segments, attending), "skipped"}
    assert folded(manifest).keys() == expected and "eagle" in expected


def differences(
    tiny: TinyBundle, own: Path, other: Path, info: GraphInfo, passes: Iterable[str] = PASSES
) -> dict[str, float]:
    """Output → the largest difference of two forms of a graph, of its largest value; tokens differ infinitely."""
    manifest, sessions = tiny.bundle.manifest, [onnx_session(own), onnx_session(other)]
    worst: dict[str, float] = {}
    for seed, what in enumerate(passes):
        run = PASSES[what]
        given = lowered_runs.inputs(manifest, tiny, info, run, seed)
        if "row_index" in given:  # rows of a layer whose proposals are wanted
            given["row_index"] %= len(run.starts) * run.width
        want, got = (lowered_outputs(ran(session, given), run) for session in sessions)
        assert want.keys() == got.keys()
        for output, array in want.items():
            found = got[output]
            assert found.shape == array.shape and found.dtype == array.dtype, output
            if array.dtype.kind == "f":
                array, found = array.astype(np.float64), found.astype(np.float64)
                far = float(np.abs(found - array).max() / np.abs(array).max())
            else:
                far = 0.0 if np.array_equal(found, array) else np.inf
            worst[output] = max(worst.get(output, 0.0), far)
    return worst


@pytest.mark.parametrize("name", ["llama", "qwen2.5-vl", "qwen2", "llava", "blip2-opt", "paligemma2"])
def test_folded_graphs_compute_the_same(tiny_bundle: Bundles, name: str) -> None:
    """Prefill, one token, wide passes, trees and ragged batches, over caches whose stale rows are garbage."""
    tiny = tiny_bundle(name)
    forms = folded(tiny.bundle.manifest)
    assert forms
    for graph, info in forms.items():
        assert info.folded is not None
        for output, far in differences(tiny, tiny.path / info.file, tiny.path / info.folded, info).items():
            assert far <= CLOSE.get(output, USUAL), f"{graph}: {output} {far:.1e}"


def test_folded_graphs_keep_the_precision(tiny_bundle: Bundles) -> None:
    """Float16, as ONNX Runtime computes both forms on a CPU: the difference is one of rounding."""
    tiny = tiny_bundle("llama-float16")
    manifest = tiny.bundle.manifest
    assert not folded(as_float32(manifest)), "the form of a CPU has other types"
    info = manifest.graphs["segment.0"]
    assert info.folded is not None
    found = differences(tiny, tiny.path / info.file, tiny.path / info.folded, info)
    assert max(found.values()) <= 2e-3, found


# --- a mask per head, and none, which no family has in groups ---


@pytest.mark.parametrize("mask_heads", [6, 1, 0])
def test_other_masks(mask_heads: int, tmp_path: Path) -> None:
    """Six heads of queries over two of keys and values; two attentions share the mask."""
    shapes: dict[str, list[int | str]] = {
        "query": ["batch", 6, "width", 8],
        "key": ["batch", 2, "cache", 8],
        "value": ["batch", 2, "cache", 4],
        "mask": ["batch", mask_heads, "width", "cache"],
    }
    given = [name for name in shapes if mask_heads or name != "mask"]
    nodes = [helper.make_node("Attention", given, [name], name=name, scale=0.5) for name in "xy"]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in given]
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 6, "width", 4]) for n in "xy"]
    graph = helper.make_graph(nodes, "toy", values, made)
    model = ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    )
    other = folded_form(model)
    assert other is not None
    kinds = [node.op_type for node in other.graph]
    assert kinds.count("Attention") == 2 and kinds.count("Expand") == (mask_heads == 1)
    own_file, other_file = tmp_path / "own.onnx", tmp_path / "other.onnx"
    ir.save(model, own_file)
    ir.save(other, other_file)
    onnx.checker.check_model(str(other_file), full_check=True)
    sizes, rng = {"batch": 3, "width": 5, "cache": 9}, np.random.default_rng(2)
    arrays = {
        name: rng.standard_normal([sizes[d] if isinstance(d, str) else d for d in shapes[name]], np.float32)
        for name in given
    }
    want, got = ran(onnx_session(own_file), arrays), ran(onnx_session(other_file), arrays)
    for name, array in want.items():
        assert np.abs(got[name] - array).max() <= USUAL * np.abs(array).max()


@pytest.mark.parametrize("form", ["precision", "no groups"])
def test_other_attentions_stay(form: str) -> None:
    heads = 2 if form == "no groups" else 6
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", count, "rows", 8])
        for name, count in (("q", heads), ("k", 2), ("v", 2), ("x", heads))
    ]
    node = helper.make_node("Attention", ["q", "k", "v"], ["x"])
    if form == "precision":
        node.attribute.append(helper.make_attribute("softmax_precision", TensorProto.FLOAT))
    graph = helper.make_graph([node], "toy", values[:3], values[3:])
    assert folded_form(ir.from_proto(helper.make_model(graph))) is None


# --- planted errors ---


def mask_as_it_is(self: Groups, mask: ir.Value, kv_heads: int, groups: int) -> ir.Value:
    """The mask of one member of each group."""
    return mask


def mask_by_row(self: Groups, mask: ir.Value, kv_heads: int, groups: int) -> ir.Value:
    """Every row of the mask once per member, in place of the whole mask."""
    write = self._write
    found = write.add("Expand", mask, write.integers(1, groups, 1, 1))
    return write.add("Reshape", write.add("Transpose", found, perm=[0, 2, 1, 3]), write.integers(0, 1, -1, 0))


def other_heads(self: Groups, query: ir.Value, kv_heads: int, head_dim: int) -> ir.Value:
    """Head h of the queries meets key/value head h modulo `kv_heads`."""
    write, groups = self._write, size(query, 1) // kv_heads
    apart = write.add("Reshape", query, write.integers(0, groups, kv_heads, -1, head_dim))
    turned = write.add("Transpose", apart, perm=[0, 2, 1, 3, 4])
    return write.add("Reshape", turned, write.integers(0, kv_heads, -1, head_dim))


MUTANTS = {mask_as_it_is: "mask", mask_by_row: "mask", other_heads: "queries"}
"""Error → the method of `Groups` that has it."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
@pytest.mark.parametrize("graph", ["segment.0", "eagle"])
def test_errors_are_found(
    tiny_bundle: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable, graph: str
) -> None:
    tiny = tiny_bundle("qwen2.5-vl")
    info = tiny.bundle.manifest.graphs[graph]
    os.link(tiny.path / "weights.bin", tmp_path / "weights.bin")
    monkeypatch.setattr(Groups, MUTANTS[mutant], mutant)
    made = folded_form(read(tiny.path / info.file))
    assert made is not None
    ir.save(made, tmp_path / "mutant.onnx")
    passes = ["wide", "tree", "ragged trees"]
    try:
        found = differences(tiny, tiny.path / info.file, tmp_path / "mutant.onnx", info, passes)
    except (Fail, InvalidArgument, RuntimeException) as error:
        assert mutant is mask_as_it_is and "mask" in str(error)
        return
    assert mutant is not mask_as_it_is and found["hidden_out"] > 1000 * USUAL, found


def test_a_soft_cap_left_out_is_found(tiny_bundle: Bundles, tmp_path: Path) -> None:
    tiny = tiny_bundle("paligemma2")
    info = tiny.bundle.manifest.graphs["segment.0"]
    os.link(tiny.path / "weights.bin", tmp_path / "weights.bin")
    made = folded_form(read(tiny.path / info.file))
    assert made is not None
    capped = [node for node in made.graph if node.op_type == "Attention"]
    for node in capped:
        assert node.attributes.pop("softcap").as_float() == 2.0
    ir.save(made, tmp_path / "mutant.onnx")
    found = differences(tiny, tiny.path / info.file, tmp_path / "mutant.onnx", info, ["wide", "tree"])
    assert capped and found["hidden_out"] > 1000 * USUAL, found


# --- what loads it ---


@pytest.mark.parametrize("draft", ["early-exit", "eagle", "tree"])
def test_the_cuda_provider_is_given_it(rigs: Callable, draft: str) -> None:
    """And gives the tokens of transformers; engines of a CPU and of plans take the graph itself."""
    rig: Rig = rigs("llama", "cuda")
    lossless.greedy(rig, draft, seeds=(43,), lengths=(5,), limits=(24,))
    opened = {path.name for path in rig.engine._opened}
    assert opened >= {"segment.0.folded.onnx", "segment.1.folded.onnx", "head.onnx", "mask.onnx"}
    assert not opened & {"segment.0.onnx", "segment.1.onnx", "eagle.onnx"}
    assert draft != "eagle" or "eagle.folded.onnx" in opened
    assert rig.manifest.graphs["segment.0"].file == "segment.0.onnx"


def test_a_bundle_without_it(tiny_bundle: Bundles, tmp_path: Path) -> None:
    """Of an older version: the graph itself is loaded."""
    tiny = tiny_bundle("llama")
    document = tiny.bundle.manifest.to_dict()
    for graph in document["graphs"].values():
        graph.pop("folded", None)
    engine = EmulatedCuda(tiny.path, Manifest.from_dict(document))
    engine.load("segment.0")
    assert {path.name for path in engine._opened} == {"segment.0.onnx"}
    engine.close()


def test_a_form_that_is_not_among_the_files(tiny_bundle: Bundles) -> None:
    document = tiny_bundle("llama").bundle.manifest.to_dict()
    del document["files"]["segment.0.folded.onnx"]
    with pytest.raises(BundleError, match=r"graphs\.segment\.0\.folded.*listed under 'files'"):
        Manifest.from_dict(document)
