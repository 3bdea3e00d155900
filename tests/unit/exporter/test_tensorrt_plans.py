"""Plans of whole tiny bundles, built by NVIDIA's builder on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from vlmexport.exporter.output import write_manifest
from vlmexport.exporter.tensorrt import TARGETS, PlanOptions, PlanReport, add_plans, inspect_network
from vlmexport.exporter.tensorrt.options import plan_precision
from vlmexport.exporter.tensorrt.profiles import Sizes, profiles_for
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.common.errors import ExportError, OptionError

pytest.importorskip("tensorrt_rtx_libs")


def _copy(bundle: Path, folder: Path) -> Path:
    return Path(shutil.copytree(bundle, folder / "bundle"))


def _manifest(bundle: Path) -> dict:
    return json.loads((bundle / "manifest.json").read_text("utf-8"))


def _planned(folder: Path, options: PlanOptions) -> PlanReport:
    """Adds plans to the bundle in `folder` and writes its manifest, as a build does."""
    bundle = Bundle(folder, Manifest.parse(_manifest(folder), ""))
    report = add_plans(bundle, options)
    write_manifest(folder, bundle.manifest)
    return report


# The contract suite builds every family for sm86 and sm89; here a T5 whose heads no fused kernel takes stands for all.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "blip2-t5" else pytest.mark.slow)
        for name in ("llama", "llama-tied", "blip2-t5", "llava-next", "qwen2.5-vl")
    ],
)
@pytest.mark.parametrize("target", [pytest.param("sm86", marks=pytest.mark.slow), "sm121"])
def test_every_graph_gets_a_plan(tiny_bundle: Callable, tmp_path: Path, name: str, target: str) -> None:
    bundle = _copy(tiny_bundle(name)[0], tmp_path)
    report = _planned(bundle, PlanOptions(target=target))
    manifest = _manifest(bundle)
    plans = {p["graph"]: p for p in manifest["plans"]}
    assert set(plans) == set(manifest["graphs"])
    assert report.precision == ("bfloat16" if name == "blip2-t5" else "float16")
    capacity = manifest["limits"]["max_length"] + manifest["limits"]["max_width"]
    for graph, plan in plans.items():
        assert (bundle / plan["file"]).stat().st_size == plan["bytes"] > plan["weight_bytes"]
        assert plan["file"] == f"plans/tensorrt-rtx/{target}/{graph}.plan"
        names = {b["name"] for b in plan["bindings"] if b["mode"] == "input"}
        assert {i["name"] for i in manifest["graphs"][graph]["inputs"]} <= names
        for binding in plan["bindings"]:
            assert "cache" not in binding["shape"]
            if binding["name"].startswith("updated_"):
                assert binding["alias_of"] == binding["name"].removeprefix("updated_")
                assert binding["shape"][2] == capacity
    layers = sum(
        s["layers"][1] - s["layers"][0] for s in manifest["graphs"].values() if s["role"] == "segment"
    )
    segments = [p for g, p in plans.items() if g.startswith("segment")]
    assert sum(p["layers"]["KV_CACHE_UPDATE"] for p in segments) == 2 * layers
    # TensorRT-RTX has no fused kernel for 3 heads here: the builder falls back, the manifest says so.
    assert all(p["fused_attention"] for p in segments) == (name not in ("blip2-t5", "qwen2.5-vl"))
    assert [p["name"] for p in segments[0]["profiles"]] == ["prefill", "token", "verify"]
    assert any((b["name"], b["dtype"]) == ("best", "int64") for b in plans["head"]["bindings"])
    Manifest.from_dict(manifest)
    Bundle.open(bundle, check="sha256")  # plans are listed files with their checksums
    assert not list(bundle.glob(".trt-*"))


@pytest.mark.slow  # tests/contract/test_graphs.py looks for it in tiny ones
def test_the_bundled_model_has_fused_attention(tmp_path: Path) -> None:
    from vlmexport.exporter.pipeline import BuildRequest, build_bundle

    request = BuildRequest(
        model="tiny-blip2-flant5", output=tmp_path / "b", draft_layer=3, parity=False, backend="tensorrt-rtx"
    )
    report = build_bundle(request)
    attention = {p["graph"]: p["fused_attention"] for p in report.plans}
    assert attention["segment.0"] and attention["segment.1"] and attention["encoder"] and attention["vision"]
    assert attention["head"] is None
    overhead = sum(p["overhead_bytes"] for p in report.plans)
    assert overhead > 0 and report.bytes > sum(p["bytes"] for p in report.plans)


def test_plans_of_a_bundle_whose_weights_are_the_checkpoints_files(tmp_path: Path) -> None:
    """The same bytes of weights in every plan, and a tied table in none."""
    import torch
    from vlmexport.exporter.pipeline import BuildRequest, build_bundle

    from tests.support import tiny_models

    model = tiny_models.checkpoint("llama-tied", tmp_path / "model", dtype=torch.float16)
    found: list[dict[str, int]] = []
    for linked in (True, False):
        request = BuildRequest(
            model=str(model), output=tmp_path / f"bundle-{linked}", draft_layer=1, parity=False, precision="float16",
            link_weights=linked, backend="tensorrt-rtx",
        )  # fmt: skip
        plans = {plan["graph"]: plan for plan in build_bundle(request).plans}
        assert "embedding_table" in [b["name"] for b in plans["head"]["bindings"]]
        found.append({graph: plan["weight_bytes"] for graph, plan in plans.items()})
    assert found[0].keys() == found[1].keys()
    for graph, count in found[0].items():
        assert abs(count - found[1][graph]) <= 256, "constants of shapes"


def test_weights_are_in_one_plan_each(tiny_bundle: Callable, tmp_path: Path) -> None:
    bundle = _copy(tiny_bundle("llama-tied")[0], tmp_path)
    _planned(bundle, PlanOptions())
    manifest = _manifest(bundle)
    plans = {p["graph"]: p for p in manifest["plans"]}
    in_plans = sum(p["weight_bytes"] for p in plans.values())
    narrow = manifest["weights"]["bytes"] / 2  # float32 on disk, float16 in plans
    table = manifest["tensors"]["embedding_table"]["bytes"] / 2
    assert in_plans < narrow - 0.9 * table  # a tied table is in no plan: both readers take it as an input
    for graph in ("embed", "head"):
        assert "embedding_table" in [b["name"] for b in plans[graph]["bindings"]]
    assert all(s["bytes"] <= 4096 for p in plans.values() for s in p["shared_weights"])


def test_a_weight_in_two_plans_is_refused(tiny_bundle: Callable, tmp_path: Path) -> None:
    bundle = _copy(tiny_bundle("llama")[0], tmp_path)
    manifest = _manifest(bundle)
    shutil.copy(bundle / "segment.0.onnx", bundle / "segment.1.onnx")  # the same weights twice
    manifest["graphs"]["segment.1"]["layers"] = manifest["graphs"]["segment.0"]["layers"]
    (bundle / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(ExportError, match=r"would be in two plans, segment\.0 and segment\.1"):
        _planned(bundle, PlanOptions())
    assert _manifest(bundle)["plans"] == []


def test_a_second_target_keeps_the_first(tiny_bundle: Callable, tmp_path: Path) -> None:
    bundle = _copy(tiny_bundle("llama")[0], tmp_path)
    _planned(bundle, PlanOptions(target="sm86"))
    report = _planned(bundle, PlanOptions(target="SM89", precision="fp32"))
    assert report.target == "sm89"
    plans = _manifest(bundle)["plans"]
    assert {p["target"] for p in plans} == {"sm86", "sm89"}
    wide = [p for p in plans if p["target"] == "sm89" and p["graph"].startswith("segment")]
    assert all(p["fused_attention"] is False and p["precision"] == "float32" for p in wide)
    Bundle.open(bundle, check="sha256")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(target="sm87"), "unknown target 'sm87' for tensorrt-rtx; choose one of sm75"),
        (PlanOptions(backend="cuda"), "unknown backend 'cuda'"),
        (PlanOptions(precision="int8"), "unknown --plan-precision 'int8'"),
        (PlanOptions(target="sm75", precision="bf16"), "sm75, which has no bfloat16"),
        (PlanOptions(target="sm75", precision="fp32"), "no float32 products"),
    ],
)
def test_wrong_options_are_named(
    tiny_bundle: Callable, tmp_path: Path, options: PlanOptions, message: str
) -> None:
    bundle = tiny_bundle("llama")[0]
    with pytest.raises(OptionError, match=message):
        _planned(bundle, options)
    assert not (bundle / "plans").exists()


def test_automatic_precision() -> None:
    assert plan_precision("auto", "sm86", "t5") == "bfloat16"
    assert plan_precision("auto", "sm75", "t5") == "float16"
    assert plan_precision("auto", "sm86", "llama") == "float16"
    assert plan_precision("bf16", "sm86", "llama") == "bfloat16"


def test_inspect_network(tiny_bundle: Callable) -> None:
    bundle = tiny_bundle("blip2-t5")[0]
    layers = _manifest(bundle)["graphs"]["segment.0"]["layers"]
    count = layers[1] - layers[0]
    summary = inspect_network(bundle / "segment.0.onnx", precision="bfloat16")
    assert summary.layers["KV_CACHE_UPDATE"] == 2 * count
    assert summary.attentions == 2 * count  # self and cross
    assert summary.unused_inputs == ()
    assert summary.aliases[f"updated_value_cache.{layers[0]}"] == f"value_cache.{layers[0]}"
    assert summary.inputs["attn_mask"][0] == "bfloat16"
    assert summary.inputs["key_cache.0"][1][2] == 128


@pytest.mark.slow  # test_native_plans.py builds every family for two of them
def test_every_target_builds(tiny_bundle: Callable, tmp_path: Path) -> None:
    for target in TARGETS:
        bundle = _copy(tiny_bundle("llama")[0], tmp_path / target)
        report = _planned(bundle, PlanOptions(target=target, precision="fp16"))
        assert {e["target"] for e in report.entries} == {target}


def test_profiles() -> None:
    sizes = Sizes(max_length=512, max_batch=3, max_width=16, max_source=100, verify_width=6, usual_source=48)
    by_name = {p.name: p for p in profiles_for("segment", sizes)}
    assert by_name["prefill"].ranges["width"] == (1, 128, 256), "as wide as prompts are read"
    assert by_name["token"].ranges["width"] == (1, 1, 1)
    assert by_name["verify"].ranges["width"] == (1, 6, 16)
    assert by_name["verify"].shapes(["batch", "source", 8], "x") == ((1, 1, 8), (1, 48, 8), (3, 100, 8))
    assert [p.name for p in profiles_for("vision", sizes)] == ["request"]
    assert {n: p.ranges["batch"][2] for n, p in by_name.items()} == {"prefill": 1, "token": 3, "verify": 3}
    assert profiles_for("cross_kv", sizes)[0].ranges["batch"] == (1, 1, 1), "requests are read one by one"
    assert [p.name for p in profiles_for("imitation", sizes)] == ["token", "verify"]
    assert {p.name: p.ranges["rows"] for p in profiles_for("head", sizes)}["verify"] == (1, 6, 48)
    with pytest.raises(ExportError, match="'patches', for which no profile is known"):
        by_name["token"].shapes(["patches"], "x")
    narrow = Sizes(max_length=8, max_batch=1, max_width=1)
    assert [p.name for p in profiles_for("segment", narrow)] == ["prefill", "token"]
