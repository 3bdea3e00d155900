"""Native plans of every family and draft, built by NVIDIA's builder on the CPU; nothing is executed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from vlmexport.exporter.common.aliases import find_alias
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.tensorrt import PlanOptions, add_plans
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.plans import planned
from vlmexport.runtime.graphs.values import caches

from tests.support import tiny_models
from tests.support.pairs import fast
from tests.support.rig import FAMILIES
from tests.support.tiny_bundles import BUNDLES, TinyBundle

pytest.importorskip("tensorrt_rtx_libs")

LAYER_BYTES, PLAN_BYTES = 9_000_000, 4_000_000
"""What kernels take: of a decoder's layer with its three profiles, and of any other plan (docs/explanation/tensorrt-plans.md, measured)."""

TARGETS, PRECISIONS = ("sm86", "sm89"), ("fp16", "bf16")
STORED = {"float16": "fp16", "bfloat16": "bf16"}


def there(case: dict[str, Any]) -> bool:
    """Whether there are such plans: a narrow bundle has those of its own type."""
    return STORED.get(BUNDLES[case["name"]].precision, case["precision"]) == case["precision"]


@pytest.mark.parametrize("max_batch", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_are_in_a_plan_once(tmp_path: Path, max_batch: int) -> None:
    """Of layers that are larger than their kernels, several in each plan; `max_batch` 1 is what most bundles for a robot have."""
    checkpoint = tiny_models.checkpoint(
        "llama", tmp_path / "model", dtype=torch.float16, hidden_size=1024, intermediate_size=4096,
        num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=4,
    )  # fmt: skip
    folder = tmp_path / "bundle"
    build_bundle(
        BuildRequest(
            model=str(checkpoint), output=folder, draft_layer=2, max_length=64, max_batch=max_batch,
            precision="float16", parity=False,
        )
    )  # fmt: skip
    bundle = Bundle.open(folder)
    report = add_plans(bundle, PlanOptions(target="sm86", precision="fp16"))
    assert {entry["graph"] for entry in report.entries} == set(planned(bundle.manifest))
    whole = [entry for entry in report.entries if entry["graph"].startswith("segment.")]
    assert sum(entry["weight_bytes"] for entry in whole) > 80_000_000
    for entry in whole:
        assert entry["bytes"] <= 1.05 * entry["weight_bytes"] + LAYER_BYTES, (
            f"{entry['graph']}: {entry['bytes']} bytes, {entry['weight_bytes']} of weights"
        )


CASES = [
    case
    for case in product(FAMILIES, TARGETS, PRECISIONS)
    if there(dict(zip(("name", "target", "precision"), case, strict=True)))
]
EVERY_RUN = {
    ("llama", "sm89", "fp16"),
    ("vit-gpt2", "sm86", "bf16"),
    ("llava-next", "sm89", "bf16"),
    ("t5-float16", "sm86", "fp16"),
}
"""What every run builds; test_graphs.py builds others, test_lowered_plans.py portable ones."""


@fast(("name", "target", "precision"), CASES, EVERY_RUN)
def test_every_graph_gets_a_native_plan(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, name: str, target: str, precision: str
) -> None:
    planned_in_full(copied(tiny_bundle(name), tmp_path), target, precision)


@pytest.mark.parametrize("name", ["llama-two-cuts", pytest.param("t5-two-cuts", marks=pytest.mark.slow)])
def test_networks_with_attention_get_native_plans(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, name: str
) -> None:
    bundle = copied(tiny_bundle(name), tmp_path)
    assert any(draft.kind == "imitation" and draft.options.own_cache for draft in bundle.manifest.drafts)
    planned_in_full(bundle, "sm86", "fp16")


SHIPPED = ("tiny-blip2-flant5", "tiny-vit-gpt2", "tiny-qwen2.5-vl")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target", "precision"), [*product(SHIPPED, TARGETS, PRECISIONS)])
def test_shipped_models_get_native_plans(tmp_path: Path, name: str, target: str, precision: str) -> None:
    """With all drafts that ship with them."""
    alias = find_alias(name)
    assert alias is not None
    drafts = [str(folder) for folder in alias.draft_folders()]
    build_bundle(BuildRequest(model=name, output=tmp_path / "bundle", drafts=drafts, parity=False))
    planned_in_full(Bundle.open(tmp_path / "bundle"), target, precision)


def copied(tiny: TinyBundle, place: Path) -> Bundle:
    """A bundle that may be changed."""
    return Bundle.open(Path(shutil.copytree(tiny.path, place / "bundle")))


def planned_in_full(bundle: Bundle, target: str, precision: str) -> None:
    """Build plans of every graph: in these types, updating caches in place, not much larger than their weights."""
    manifest = bundle.manifest
    report = add_plans(bundle, PlanOptions(target=target, precision=precision))
    assert {entry["graph"] for entry in report.entries} == set(planned(manifest))
    drafts = {graph for draft in manifest.drafts for graph in draft.graphs.values()}
    assert drafts and drafts <= set(manifest.graphs)
    updates = 0
    for entry in report.entries:
        info = manifest.graphs[entry["graph"]]
        assert (entry["target"], entry["lowering"]) == (target, "native")
        assert STORED[entry["precision"]] == precision
        layers = 1 if info.layers is None else info.layers[1] - info.layers[0]
        most = 1.05 * entry["weight_bytes"] + PLAN_BYTES + LAYER_BYTES * layers
        assert entry["bytes"] <= most, (
            f"{entry['graph']}: {entry['bytes']} bytes, {entry['weight_bytes']} of weights"
        )
        names = {binding["name"] for binding in entry["bindings"] if binding["mode"] == "input"}
        assert {value.name for value in info.inputs} <= names
        for binding in entry["bindings"]:
            if binding["name"].startswith("updated_"):
                assert binding["alias_of"] == binding["name"].removeprefix("updated_")
        updates += entry["layers"].get("KV_CACHE_UPDATE", 0) if info.role == "segment" else 0
    assert updates == len(caches(manifest, range(manifest.decoder.num_layers)))
