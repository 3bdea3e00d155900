"""Portable plans of every family, built by NVIDIA's builder on the CPU; nothing is executed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from vlmexport.exporter.output import write_manifest
from vlmexport.exporter.tensorrt import PlanOptions, add_plans
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.plans import planned
from vlmexport.runtime.decoder.kv_cache import key_value
from vlmexport.runtime.drafts.eagle.layer_role import LayerOptions
from vlmexport.runtime.engines.kv_append import NEW_MASKS
from vlmexport.runtime.graphs.registry import draft_kinds
from vlmexport.runtime.graphs.values import CONV_SLOTS, attention_masks, layer_caches

from tests.support.rig import FAMILIES
from tests.support.tiny_bundles import TinyBundle

pytest.importorskip("tensorrt_rtx_libs")

DRAFT_LAYERS = [name for name, kind in draft_kinds().items() if issubclass(kind.options, LayerOptions)]
"""Draft kinds that are one layer with a cache of its own."""

ATTENDING = ("segment", *DRAFT_LAYERS, "adaptor", "encoder", "vision")

QUICK = ("t5", "qwen2.5-vl", "llama-bfloat16")
"""A float mask and cross-attention; three axes of positions and groups of queries; types as they are stored."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAMILIES]
)
def test_every_graph_gets_a_portable_plan(
    tiny_bundle: Callable[..., TinyBundle], tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(tiny_bundle(name).path, tmp_path / "bundle"))
    bundle = Bundle.open(folder)
    manifest = bundle.manifest
    report = add_plans(bundle, PlanOptions(target="sm86", lowering="portable"))
    write_manifest(folder, manifest)
    assert report.lowering == "portable" and {e["graph"] for e in report.entries} == set(planned(manifest))
    decoder, limits = manifest.decoder, manifest.limits
    rows = limits.max_length + limits.max_width
    for plan in Bundle.open(folder, check="sha256").manifest.plans:
        assert plan["lowering"] == "portable" and plan["executed"] is False
        kinds = {kind for kind in plan["layers"] if "ATTENTION" in kind or "KV_CACHE" in kind}
        assert not kinds, f"{plan['graph']}: {kinds}"
        assert not any("alias_of" in binding for binding in plan["bindings"])
        shapes = {binding["name"]: binding["shape"] for binding in plan["bindings"]}
        dtypes = {binding["name"]: binding["dtype"] for binding in plan["bindings"]}
        info = manifest.graphs[plan["graph"]]
        attends = info.role in ATTENDING
        if info.role == "segment":
            attends = bool(attention_masks(decoder, range(*info.layers)))
        assert plan["fused_attention"] is (False if attends else None)
        if info.role not in ("segment", "commit", *DRAFT_LAYERS):
            continue
        assert ("write_indices" in shapes) == (
            CONV_SLOTS in shapes
        )  # a convolution's rows are old or new by it
        own = manifest.draft(info.role).options.own_cache if info.role in DRAFT_LAYERS else None
        for layer in range(*(info.layers or (0, (own or decoder).num_layers))):
            layers = key_value(own.num_kv_heads, own.head_dim) if own else layer_caches(decoder, layer)
            for name, (heads, size) in layers.items():
                kind = name.removesuffix("_cache")
                assert shapes[f"{kind}_cache.{layer}"] == ["batch", heads, rows, size]
                assert shapes[f"new_{kind}.{layer}"] == ["batch", heads, "width", size]
                assert dtypes[f"new_{kind}.{layer}"] == dtypes[f"{kind}_cache.{layer}"] == plan["precision"]
        if info.role != "commit":
            masks = 1 if own else decoder.mask_heads
            read = {whole: new for whole, new in NEW_MASKS.items() if whole in shapes}
            assert read or CONV_SLOTS in shapes, "some mask is read"
            for whole, new in read.items():
                assert shapes[whole] == ["batch", masks, "width", rows]
                assert shapes[new] == ["batch", masks, "width", "width"]
                assert dtypes[new] == dtypes[whole]
