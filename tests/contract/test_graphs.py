"""Every exported graph: nothing declared in vain, and NVIDIA's own parser and builder accept it (nothing is executed)."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from vlmexport.exporter.graphs.dtypes import ONNX
from vlmexport.runtime.bundle import plans as bundle_plans
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.graphs.values import attention_masks, caches

from tests.support.pairs import fast
from tests.support.rig import FAMILIES
from tests.support.tiny_bundles import TinyBundle

ALL = [*FAMILIES, *(f"{family}-two-cuts" for family in FAMILIES)]


def graphs(tiny: TinyBundle) -> Iterator[tuple[str, Any, onnx.GraphProto]]:
    """Name, manifest entry and ONNX graph of every graph; of narrow bundles in both forms."""
    source = tiny.bundle.manifest
    for manifest in (source,) if as_float32(source) is source else (source, as_float32(source)):
        for name, info in manifest.graphs.items():
            yield name, info, onnx.load(str(tiny.path / info.file), load_external_data=False).graph


@pytest.mark.parametrize("name", ALL)
def test_every_declared_input_is_consumed(tiny_bundle: Callable[..., TinyBundle], name: str) -> None:
    seen = 0
    for graph, info, model in graphs(tiny_bundle(name)):
        read = {value for node in model.node for value in node.input}
        made = {value for node in model.node for value in node.output}
        declared = [value.name for value in model.input]
        assert declared == [value.name for value in info.inputs], graph
        assert [value.name for value in model.output] == [value.name for value in info.outputs], graph
        assert set(declared) <= read, f"{graph}: nobody reads {set(declared) - read}"
        assert {value.name for value in model.output} <= made, graph
        for value, entry in zip((*model.input, *model.output), (*info.inputs, *info.outputs), strict=True):
            assert value.type.tensor_type.elem_type == ONNX[entry.dtype], f"{graph}: {entry.name}"
        seen += 1
    assert seen >= 5


@pytest.mark.parametrize("name", ALL)
def test_plain_operators_and_explicit_masks_only(tiny_bundle: Callable[..., TinyBundle], name: str) -> None:
    tiny = tiny_bundle(name)
    kept = caches(tiny.bundle.manifest, range(tiny.bundle.manifest.decoder.num_layers))
    writes = 0
    for graph, info, model in graphs(tiny):
        for node in model.node:
            assert node.domain == "", f"{graph}: {node.domain}.{node.op_type}"
            if node.op_type == "Attention":
                options = {attribute.name: attribute for attribute in node.attribute}
                assert "is_causal" not in options or options["is_causal"].i == 0, f"{graph}: is_causal"
                assert len([value for value in node.input if value]) <= 4, (
                    f"{graph}: past or length inputs in Attention"
                )
                assert len(node.output) == 1
        writes += sum(node.op_type == "TensorScatter" for node in model.node) if info.role == "segment" else 0
    forms = 1 if as_float32(tiny.bundle.manifest) is tiny.bundle.manifest else 2
    assert writes == len(kept) * forms


@pytest.fixture(scope="module")
def planned(
    tiny_bundle: Callable[..., TinyBundle], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """`planned(name)`: plan entries by graph, built for SM86 on this CPU, in float16 or as a narrow bundle has it."""
    pytest.importorskip(
        "tensorrt_rtx_libs", reason="tensorrt-rtx is not installed: pip install vlmexport[tensorrt-rtx]"
    )
    from vlmexport.exporter.tensorrt import PlanOptions, add_plans

    made: dict[str, dict[str, Any]] = {}

    def get(name: str) -> dict[str, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp("plans") / "bundle"
            shutil.copytree(tiny_bundle(name).path, folder)
            bundle = Bundle.open(folder)
            precision = "fp16" if bundle.manifest.weights_dtype == "float32" else "auto"
            add_plans(bundle, PlanOptions(target="sm86", precision=precision))
            entries = bundle.manifest.plans
            made[name] = {entry["graph"]: entry | {"path": folder / entry["file"]} for entry in entries}
        return made[name]

    return get


@fast(("name",), [(name,) for name in FAMILIES], {("t5",), ("qwen2.5-vl",)})
def test_tensorrt_builds_every_graph(
    tiny_bundle: Callable[..., TinyBundle], planned: Callable, name: str
) -> None:
    manifest = tiny_bundle(name).bundle.manifest
    plans = planned(name)
    from vlmexport.exporter.tensorrt.plans import SHARED_TABLES

    assert set(plans) == set(bundle_plans.planned(manifest))
    for graph, entry in plans.items():
        plan: Path = entry["path"]
        assert plan.stat().st_size == entry["bytes"] > 0, graph
        narrow = "float16" if manifest.weights_dtype == "float32" else manifest.weights_dtype
        assert entry["target"] == "sm86" and entry["precision"] == narrow and entry["executed"] is False
        read = {row["name"] for row in entry["bindings"] if row["mode"] == "input"}
        declared = {value.name for value in manifest.graphs[graph].inputs}
        assert declared <= read, f"{graph}: TensorRT dropped {declared - read}"
        assert read - declared <= set(SHARED_TABLES), f"{graph}: unknown inputs {read - declared}"


@fast(("name",), [(name,) for name in FAMILIES], {("t5",), ("qwen2.5-vl",)})
def test_tensorrt_updates_caches_in_place_and_fuses_attention(
    tiny_bundle: Callable[..., TinyBundle], planned: Callable, name: str
) -> None:
    manifest = tiny_bundle(name).bundle.manifest
    for graph, entry in planned(name).items():
        info, layers = manifest.graphs[graph], Counter(entry["layers"])
        aliases = {row["name"]: row.get("alias_of") for row in entry["bindings"] if row["mode"] == "output"}
        if info.role == "segment":
            own = range(*info.layers)
            count = sum(bool(attention_masks(manifest.decoder, [layer])) for layer in own)
            assert layers["KV_CACHE_UPDATE"] == len(caches(manifest, own)), (graph, layers)
            capped = manifest.model.decoder == "gemma2"  # TensorRT's attention has no soft cap
            attentions = 0 if capped else count * (2 if manifest.decoder.cross_attention else 1)
            assert layers["ATTENTION_INPUT"] == attentions, (graph, layers)
            fused = not capped if count else None
            assert entry["fused_attention"] is fused, f"{graph}: attention was decomposed"
        if info.role == "commit":
            assert layers["KV_CACHE_UPDATE"] == len(caches(manifest, range(manifest.decoder.num_layers)))
        for output, source in aliases.items():
            if output.startswith("updated_"):
                assert source == output.removeprefix("updated_"), (
                    f"{graph}: {output} is at the address of {source}"
                )


@fast(("name",), [(name,) for name in FAMILIES], {("t5",), ("qwen2.5-vl",)})
def test_tensorrt_reads_every_input_in_the_parsed_network(
    tiny_bundle: Callable[..., TinyBundle], planned: Callable, name: str
) -> None:
    planned(name)  # skips without TensorRT
    from vlmexport.exporter.tensorrt import inspect_network

    tiny = tiny_bundle(name)
    limits = tiny.bundle.manifest.limits
    for graph, info in tiny.bundle.manifest.graphs.items():
        summary = inspect_network(
            tiny.bundle.path / info.file,
            capacity=limits.max_length + limits.max_width,
            precision="float16" if tiny.bundle.manifest.weights_dtype == "float32" else "float32",  # as it is
        )
        assert summary.unused_inputs == (), f"{graph}: {summary.unused_inputs}"
        assert set(summary.inputs) == {value.name for value in info.inputs}, graph
