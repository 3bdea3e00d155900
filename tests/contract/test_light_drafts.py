"""Drafts whose matrices are integers: the target's tokens whatever they propose, parity as tight as for floats, and fused
products on ONNX Runtime."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity.capture import Captured, capture
from vlmexport.exporter.parity.compare import compare_graphs
from vlmexport.exporter.parity.errors import float32_errors
from vlmexport.exporter.parity.recorded import compared_inputs, compared_rows
from vlmexport.exporter.parity.reference import load_exact, load_reference
from vlmexport.exporter.parity.runner import GraphRunner
from vlmexport.exporter.parity.tally import ParityRow
from vlmexport.exporter.pipeline import BuildRequest
from vlmexport.exporter.pipeline.dry_run import dry_run
from vlmexport.exporter.quantization.blocks import LIMITS
from vlmexport.exporter.quantization.matrix import SCALES
from vlmexport.exporter.tensorrt import PlanOptions, add_plans
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import DraftInfo, Manifest
from vlmexport.runtime.bundle.plans import planned
from vlmexport.runtime.engines.onnxruntime import use_global_pool
from vlmexport.runtime.hardware.devices import DEVICES
from vlmexport.runtime.measure.fit import fit, roofline

from tests.support import lossless
from tests.support.pairs import each_value
from tests.support.tiny_bundles import BUNDLES, LIGHT, TinyBundle

TENSOR = onnx.TensorProto


def there(case: dict[str, Any]) -> bool:
    """Whether the bundle has the draft."""
    recipe = BUNDLES[case["name"]]
    absent = "vispec" if not recipe.sees else "eagle3" if recipe.taps is None else ""
    return not absent or not case["draft"].startswith(absent)


DRAFTS = ("imitation", "medusa", "medusa-tree", "eagle", "eagle-tree", "eagle3-tree", "vispec-tree")


@each_value(there, name=LIGHT, draft=DRAFTS, temperature=(0, 1))
def test_integers_change_no_token(rigs: Callable, name: str, draft: str, temperature: int) -> None:
    rig = rigs(name, "onnxruntime")
    if temperature:
        lossless.sampled(rig, draft, (1,), (4,))
    else:
        lossless.greedy(rig, draft, (41,), (1, 5), (24,))


@pytest.mark.parametrize("name", LIGHT)
def test_integers_change_no_token_in_a_batch(rigs: Callable, name: str) -> None:
    lossless.batch(rigs(name, "onnxruntime"), "mixed", 3, 7)


def bringing_weights(manifest: Manifest) -> list[DraftInfo]:
    """Drafts that have graphs over weights that are not the target's."""
    return [draft for draft in manifest.drafts if draft.graphs and draft.kind != "draft-and-verify"]


def drafts_graphs(tiny: TinyBundle) -> dict[str, onnx.ModelProto]:
    """Graphs of the bundle that the CPU engine loads → their files, those of drafts only."""
    manifest = as_float32(tiny.bundle.manifest)
    names = [name for draft in bringing_weights(manifest) for name in draft.graphs.values()]
    return {
        name: onnx.load(str(tiny.path / manifest.graphs[name].file), load_external_data=False)
        for name in names
    }


@pytest.mark.parametrize("name", LIGHT)
def test_only_what_drafts_bring_along_is_integers(tiny_bundle: Callable[..., TinyBundle], name: str) -> None:
    """Every matrix of a draft is, nothing that the target reads is; the manifest says so."""
    tiny = tiny_bundle(name)
    recipe, manifest = BUNDLES[name], tiny.bundle.manifest
    graphs = drafts_graphs(tiny)
    kind = getattr(TENSOR, (recipe.draft_precision or "").upper())
    for graph in manifest.graphs:
        model = graphs.get(graph) or onnx.load(
            str(tiny.path / manifest.graphs[graph].file), load_external_data=False
        )
        found = [t for t in model.graph.initializer if t.data_type in (TENSOR.INT8, TENSOR.INT4)]
        if graph not in graphs:
            assert not found, graph
            continue
        assert found and all(t.data_type == kind and t.name.startswith("draft.") for t in found)
        floats = [t.name for t in model.graph.initializer if len(t.dims) == 2 and t.data_type != kind]
        floats = [n for n in floats if n.startswith("draft.") and not n.endswith(f"{SCALES}.T")]
        assert not floats, f"{graph}: {floats} are no integers"
    own = {draft.name: draft.weights_dtype for draft in bringing_weights(manifest)}
    assert set(own.values()) == {recipe.draft_precision} and manifest.weights_dtype == recipe.precision
    numbers = sum(p.numel() for draft in tiny.drafts().values() for p in draft.network.parameters())
    assert (
        sum(manifest.graphs[graph].parameters or 0 for graph in graphs) >= numbers
    )  # and the target's they read


@pytest.mark.parametrize("name", LIGHT)
def test_onnx_runtime_fuses_every_product(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, name: str
) -> None:
    """Dequantised in front of the product, a matrix would be read as floats: nothing would be saved."""
    tiny = tiny_bundle(name)
    manifest = as_float32(tiny.bundle.manifest)
    for graph, model in drafts_graphs(tiny).items():
        wanted = sum(node.op_type == "DequantizeLinear" for node in model.graph.node)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        use_global_pool()
        options.use_per_session_threads = False
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        ort.InferenceSession(
            str(tiny.path / manifest.graphs[graph].file), options, providers=["CPUExecutionProvider"]
        )
        loaded = onnx.load(options.optimized_model_filepath, load_external_data=False)
        found = Counter(node.op_type for node in loaded.graph.node)
        assert wanted and found["MatMulNBits"] == wanted and not found["DequantizeLinear"], (graph, found)


@pytest.fixture(scope="module")
def captured(tiny_bundle: Callable[..., TinyBundle]) -> Callable[[str], list[Captured]]:
    """`captured(name)`: what the reference of a bundle computed on parity's inputs."""
    made: dict[str, list[Captured]] = {}

    def get(name: str) -> list[Captured]:
        if name not in made:
            tiny = tiny_bundle(name)
            manifest, checkpoint = tiny.bundle.manifest, open_checkpoint(str(tiny.checkpoint))
            family, dtype = family_for(checkpoint), manifest.weights_dtype
            model, exact = load_reference(checkpoint, dtype, streamed=False), load_exact(checkpoint, dtype)
            made[name] = []
            rows = compared_rows(manifest.limits.max_length)
            for kind, inputs in compared_inputs(family, rows, streamed=False):
                found = capture(model, family, kind, manifest.decoder.cuts, inputs, True)
                found.error = float32_errors(exact, family, manifest.decoder.cuts, inputs, found)
                made[name].append(found)
        return made[name]

    return get


def parity(tiny: TinyBundle, folder: Path, captures: list[Captured]) -> dict[str, ParityRow]:
    """What parity says of the drafts' graphs of the bundle in `folder`."""
    recipe = BUNDLES[tiny.name]
    manifest = as_float32(tiny.bundle.manifest)
    names = {name for draft in bringing_weights(manifest) for name in draft.graphs.values()}
    few = replace(manifest, graphs={name: manifest.graphs[name] for name in manifest.graphs if name in names})
    drafts = [
        draft.with_precision(recipe.draft_precision).fitted(manifest.decoder.num_layers)
        for draft in tiny.drafts().values()
    ]
    stored, whole = (
        [draft.with_precision(kept).stored_as(recipe.precision) for draft in drafts]
        for kept in (recipe.draft_precision, None)
    )
    rows = compare_graphs(Bundle(folder, few), GraphRunner(folder, piecewise=False), captures, stored, whole)
    assert {row.graph for row in rows} == names
    return {row.graph: row for row in rows}


@pytest.mark.parametrize("name", LIGHT)
def test_parity_is_as_tight_as_for_floats(
    tiny_bundle: Callable[..., TinyBundle], captured: Callable, name: str
) -> None:
    """Compared with the network of the same numbers; the way from there to the trained one is said, and is what so many
    bits cost."""
    tiny = tiny_bundle(name)
    for graph, row in parity(tiny, tiny.path, captured(name)).items():
        assert row.ok, row
        assert row.quantization_difference is not None
        assert row.quantization_difference > 20 * row.limit, f"{graph}: the integers changed nothing"
    assert set(LIMITS) == {BUNDLES[each].draft_precision for each in LIGHT}


def scales_of_the_next_block(raw: np.ndarray, tensor: onnx.TensorProto) -> np.ndarray:
    return np.roll(raw.view(np.float32).reshape(tensor.dims), 1, axis=0)


def halves_exchanged(raw: np.ndarray, tensor: onnx.TensorProto) -> np.ndarray:
    return (raw >> 4) | (raw << 4)


@pytest.mark.parametrize(
    ("mutate", "kind"), [(scales_of_the_next_block, TENSOR.FLOAT), (halves_exchanged, TENSOR.INT4)]
)
def test_parity_finds_what_was_stored_wrongly(
    tiny_bundle: Callable[..., TinyBundle], captured: Callable, tmp_path: Path, mutate: Callable, kind: int
) -> None:
    tiny = tiny_bundle("llama-int4")
    folder = Path(shutil.copytree(tiny.path, tmp_path / "bundle"))
    weights = np.memmap(folder / "weights.bin", np.uint8, "r+")
    for model in drafts_graphs(tiny).values():
        for tensor in model.graph.initializer:
            light = tensor.data_type == TENSOR.INT4 or tensor.name.endswith(f"{SCALES}.T")
            if not light or tensor.data_type != kind:
                continue
            place = {each.key: each.value for each in tensor.external_data}
            start = int(place["offset"])
            part = weights[start : start + int(place["length"])]
            part[:] = mutate(np.array(part), tensor).reshape(-1).view(np.uint8)
    weights.flush()
    for graph, row in parity(tiny, folder, captured("llama-int4")).items():
        assert not row.ok, f"{graph}: not found"


def test_a_dry_run_counts_what_a_build_writes(tiny_bundle: Callable, tmp_path: Path) -> None:
    """The bundle has the bytes that the dry run of its request says; a session holds the integers as they are."""
    tiny = tiny_bundle("llama-int4")
    folders = [*tiny.draft_folders.values(), tiny.medusa, tiny.eagle, tiny.eagle3, tiny.skipping]
    request = BuildRequest(
        model=str(tiny.checkpoint), output=tmp_path / "none", drafts=list(map(str, folders)), max_length=160, max_width=20,
        draft_precision=["int4"],
    )  # fmt: skip
    found = dry_run(request)
    manifest = tiny.bundle.manifest
    graphs = {graph for draft in bringing_weights(manifest) for graph in draft.graphs.values()}
    assert found.weight_bytes == manifest.weights.bytes
    assert found.draft_precisions == dict.fromkeys(("imitation@1", "medusa", "eagle", "eagle3"), "int4")
    assert found.peak_memory.weights <= found.weight_bytes < found.peak_memory.weights * 1.2, (
        "alignment, and ids"
    )
    assert {graph.name: graph.parameters for graph in found.graphs} == {
        name: info.parameters for name, info in manifest.graphs.items()
    }
    for name, info in manifest.graphs.items():
        assert bool(info.integers) == (name in graphs)
        assert manifest.integer_bytes(name) == -(-(info.integers or 0) // 2)


def test_a_light_draft_stays_light_in_plans(tiny_bundle: Callable) -> None:
    """Its integers are read as they are, everything else in the plans' type."""
    wide, light = (tiny_bundle(name).bundle.manifest for name in ("llama", "llama-int4"))
    found = light.graphs["medusa"]
    assert found.integers and found.parameters == wide.graphs["medusa"].parameters
    table = roofline(light, 1e9, 40)
    assert table.drafts["medusa"].once == pytest.approx(
        (2 * (found.parameters - found.integers) + found.integers / 2 + 2 * found.integers / 32) / 1e9
    )
    assert table.token_seconds() == pytest.approx(roofline(wide, 1e9, 40).token_seconds())
    needed = [
        fit(each, DEVICES["h100"], length=64, batch=1, acceptance=0.5)["needed"]["weights"]
        for each in (wide, light)
    ]
    integers = sum(info.integers or 0 for info in light.graphs.values())
    scales = 2 * integers / 32
    assert needed[1] == pytest.approx(needed[0] - 1.5 * integers + scales, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("target", ("sm86", "sm89"))
def test_integers_stay_integers_in_plans(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, name: str, target: str
) -> None:
    """NVIDIA's builder takes every graph that can have a plan; none holds a draft's matrices in floats."""
    pytest.importorskip("tensorrt_rtx_libs")
    bundle = Bundle.open(Path(shutil.copytree(tiny_bundle(name).path, tmp_path / "bundle")))
    report = add_plans(bundle, PlanOptions(target=target, precision="fp16"))
    assert {entry["graph"] for entry in report.entries} == set(planned(bundle.manifest))
    light = {graph for draft in bundle.manifest.drafts for graph in draft.graphs.values()}
    for entry in report.entries:
        assert bool(entry["layers"].get("DEQUANTIZE")) == (entry["graph"] in light), entry["layers"]
