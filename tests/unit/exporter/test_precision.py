"""Bundles of float16 and bfloat16: the same tokens as the float32 model with rounded weights, and half the bytes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.parity import check_parity, reference
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.pipeline.dry_run import dry_run
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.seal import manifest_text
from vlmexport.runtime.common.bfloat16 import bfloat16_bits, lowest, widen
from vlmexport.runtime.common.errors import BundleError, ExportError, OptionError
from vlmexport.runtime.decoder.masks import CausalMask, encoder_mask
from vlmexport.runtime.session.session import Session

from tests.support import tiny_models

NARROW = ("float16", "bfloat16")
QUICK = {
    ("blip2-t5", "float16"), ("blip2-t5", "bfloat16"), ("blip2-opt", "bfloat16"), ("vit-gpt2", "float16"),
    ("llama", "float16"), ("llama", "bfloat16"),
}  # fmt: skip
"""Combinations of every run; the others are slow."""
ROUNDED = [
    pytest.param(name, precision, marks=() if (name, precision) in QUICK else pytest.mark.slow)
    for name in ("blip2-t5", "blip2-opt", "vit-gpt2", "llama", "llama-tied", "t5")
    for precision in NARROW
]


@pytest.fixture(scope="module")
def narrow_bundle(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, Path]]:
    """`narrow_bundle(name, precision)` → (bundle, checkpoint of float32); parity is checked while it is built."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(name: str, precision: str) -> tuple[Path, Path]:
        if (name, precision) not in made:
            out, model = tmp_path_factory.mktemp(name) / "bundle", tiny_checkpoint(name)
            build_bundle(BuildRequest(model=str(model), output=out, draft_layer=1, precision=precision))
            made[name, precision] = out, model
        return made[name, precision]

    return get


def answers(bundle: Path, **options: Any) -> list[list[int]]:
    """Tokens of three requests."""
    with Session.load(bundle) as session:
        image = None
        if session.bundle.manifest.image is not None:
            image = np.random.default_rng(4).integers(0, 256, (50, 70, 3), np.uint8)
        return [
            session.generate(image, prompt, max_new_tokens=32, ignore_eos=True, **options).tokens
            for prompt in ("the red cup", "a robot", "what is on the table")
        ]


@pytest.mark.parametrize(("name", "precision"), ROUNDED)
def test_tokens_are_those_of_float32_on_rounded_weights(
    narrow_bundle: Callable, tmp_path: Path, name: str, precision: str
) -> None:
    bundle, model = narrow_bundle(name, precision)
    parity = json.loads((bundle / "manifest.json").read_text("utf-8"))["parity"]
    assert {"generation", "preparation", "segment.1"} <= {entry["graph"] for entry in parity}
    rounded = Path(shutil.copytree(model, tmp_path / "model"))
    tensors = load_file(rounded / "model.safetensors")
    dtype = getattr(torch, precision)
    changed = {n: t.to(dtype).float() if t.is_floating_point() else t for n, t in tensors.items()}
    assert any(not torch.equal(changed[n], tensors[n]) for n in tensors)
    save_file(changed, rounded / "model.safetensors", {"format": "pt"})
    wide = tmp_path / "wide"
    build_bundle(BuildRequest(model=str(rounded), output=wide, draft_layer=1, parity=False))
    expected = answers(wide, speculative=False)
    assert len({token for tokens in expected for token in tokens}) > 8
    assert answers(bundle, speculative=False) == expected
    assert answers(bundle, draft="early-exit@1", draft_length=4) == expected


@pytest.mark.parametrize("precision", NARROW)
def test_the_bytes_halve_and_nothing_else_is_stored(narrow_bundle: Callable, precision: str) -> None:
    folder, model = narrow_bundle("llama", precision)
    bundle = Bundle.open(folder, check="sha256")
    tensors = load_file(model / "model.safetensors")
    stored = bundle.manifest.weights.bytes
    assert (
        2 * bundle.manifest.model.parameters
        <= stored
        <= 2 * bundle.manifest.model.parameters + 64 * 2 * len(tensors)
    )
    manifest = bundle.manifest
    assert manifest.weights_dtype == manifest.compute_dtype == manifest.cache_dtype == precision
    assert manifest.tensors["embedding_table"].dtype == precision


def test_t5_keeps_its_residual_stream_in_float32_where_float16_overflows(narrow_bundle: Callable) -> None:
    for precision, compute in (("float16", "float32"), ("bfloat16", "bfloat16")):
        manifest = Bundle.open(narrow_bundle("blip2-t5", precision)[0]).manifest
        assert (manifest.weights_dtype, manifest.compute_dtype, manifest.cache_dtype) == (
            precision,
            compute,
            precision,
        )
        types = {
            v.name: v.dtype
            for v in (*manifest.graphs["segment.0"].inputs, *manifest.graphs["encoder"].inputs)
        }
        assert types["hidden"] == types["encoder_rows"] == compute
        assert (
            types["attn_mask"]
            == types["encoder_mask"]
            == types["cross_key.0"]
            == types["key_cache.0"]
            == precision
        )


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("name", ["blip2-t5", "llama"])
def test_parity_layer_by_layer(narrow_bundle: Callable, name: str, precision: str) -> None:
    bundle, model = narrow_bundle(name, precision)
    entries = check_parity(bundle, open_checkpoint(model), memory_limit=0)
    assert all(entry["values"] > 0 and entry["relative_difference"] <= entry["limit"] for entry in entries)


@pytest.mark.parametrize("memory", [1 << 40, 0], ids=["whole", "layer-by-layer"])
def test_parity_without_rounding_fails(
    narrow_bundle: Callable, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    bundle, model = narrow_bundle("llama", "bfloat16")
    load = reference.load_reference
    monkeypatch.setattr(
        "vlmexport.exporter.parity.check.load_reference",
        lambda checkpoint, _dtype, streamed: load(checkpoint, streamed=streamed),
    )
    with pytest.raises(ExportError, match="parity failed"):
        check_parity(bundle, open_checkpoint(model), memory_limit=memory)


def test_the_device_says_what_it_does_otherwise(narrow_bundle: Callable, tiny_bundle: Callable) -> None:
    with Session.load(narrow_bundle("llama", "float16")[0]) as session:
        assert session.note is not None and session.note.startswith("float16 weights become float32")
        assert session.decoder.dtype == "float32"
    with Session.load(tiny_bundle("llama")[0]) as session:
        assert session.note is None


def test_a_bundle_without_its_float32_files_is_refused_by_a_cpu(
    narrow_bundle: Callable, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(narrow_bundle("llama", "float16")[0], tmp_path / "bundle"))
    document = json.loads((folder / "manifest.json").read_text("utf-8"))
    for graph in document["graphs"].values():
        (folder / graph.pop("float32")).unlink()
    document["files"] = {n: f for n, f in document["files"].items() if not n.endswith(".float32.onnx")}
    (folder / "manifest.json").write_text(manifest_text(document), "utf-8")
    assert Bundle.open(folder).manifest.weights_dtype == "float16"
    with pytest.raises(BundleError, match=r"graphs\.embed\.float32.*cannot be computed in float32"):
        Session.load(folder)


def test_widening_changes_types_and_files_only(narrow_bundle: Callable, tiny_bundle: Callable) -> None:
    manifest = Bundle.open(narrow_bundle("blip2-t5", "float16")[0]).manifest
    wide = as_float32(manifest)
    assert as_float32(wide) is wide
    assert Manifest.from_dict(wide.to_dict()).decoder.mask_dtype == "float32"  # and every interface fits
    for name, graph in wide.graphs.items():
        source = manifest.graphs[name]
        assert graph.file == f"{name}.float32.onnx" and source.file == f"{name}.onnx"
        assert [(v.name, v.shape) for v in graph.inputs] == [(v.name, v.shape) for v in source.inputs]
        kinds = {v.dtype for v in (*graph.inputs, *graph.outputs) if v.name != "embedding_table"}
        assert not kinds & set(NARROW), name
    usual = Bundle.open(tiny_bundle("llama")[0]).manifest
    assert as_float32(usual) is usual


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("int8", "--draft-precision int8"),
        ("int4", "--draft-precision int4"),
        ("fp8", "unknown"),
        ("half", "unknown"),
    ],
)
def test_other_precisions_are_refused_in_one_line(
    tiny_checkpoint: Callable, tmp_path: Path, value: str, words: str
) -> None:
    request = BuildRequest(model=str(tiny_checkpoint("llama")), output=tmp_path / "b", precision=value)
    with pytest.raises(OptionError, match=f"--precision '?{value}'?:? .*{words}"):
        build_bundle(request)
    assert list(tmp_path.iterdir()) == []


def test_short_names_and_what_a_dry_run_says(tiny_checkpoint: Callable, tmp_path: Path) -> None:
    model = str(tiny_checkpoint("llama"))
    wide = dry_run(BuildRequest(model=model, output=tmp_path / "b"))
    narrow = dry_run(BuildRequest(model=model, output=tmp_path / "b", precision="fp16"))
    assert narrow.precision == "float16" and narrow.parameters == wide.parameters
    assert narrow.kv_bytes_per_token * 2 == wide.kv_bytes_per_token
    assert math.isclose(narrow.weight_bytes * 2, wide.weight_bytes, rel_tol=0.05)
    # A CPU computes in float32 whatever is stored.
    assert math.isclose(narrow.peak_memory.run, wide.peak_memory.run, rel_tol=0.01)


def test_a_weight_beyond_float16_stops_the_build(tmp_path: Path) -> None:
    model = tiny_models.checkpoint("llama", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 2] = 1e5
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    request = BuildRequest(model=str(model), output=tmp_path / "bundle", precision="float16", draft_layer=1)
    with pytest.raises(
        ExportError, match=rf"tensor {name} reaches 1e\+05, beyond float16; use --precision bfloat16"
    ):
        build_bundle(request)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# --- numbers in buffers ---


def test_bfloat16_bits_are_those_of_torch() -> None:
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32) * 10.0 ** np.arange(
        -30, 20
    ).repeat(100)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    bits = bfloat16_bits(values)
    assert np.array_equal(bits, expected.view(torch.uint16).numpy())
    assert np.array_equal(widen(bits, np.dtype(np.float32)), expected.float().numpy())
    assert lowest(np.dtype(np.uint16)) == torch.finfo(torch.bfloat16).min


@pytest.mark.parametrize("dtype", [np.float16, np.uint16], ids=["float16", "bfloat16"])
def test_masks_of_narrow_types_are_rounded_ones(dtype: type) -> None:
    kind, wide = np.dtype(dtype), np.dtype(np.float32)
    table = np.random.default_rng(1).standard_normal((32, 4)).astype(np.float32)
    narrow = widen(table, kind)
    found, expected = np.empty((1, 4, 3, 20), kind), np.empty((1, 4, 3, 20), wide)
    CausalMask(20, 4, kind, narrow).chain(found, 0, 6, 3)
    CausalMask(20, 4, wide, widen(narrow, wide)).chain(expected, 0, 6, 3)
    visible = expected > -1e30
    assert np.array_equal(widen(found, wide)[visible], expected[visible])
    assert (widen(found, wide)[~visible] < -3e4).all() and np.isfinite(widen(found, wide)).all()
    both, bias = np.empty((2, 4, 5, 5), kind), np.empty((2, 4, 5, 5), wide)
    encoder_mask(both, [5, 3], narrow)
    encoder_mask(bias, [5, 3], widen(narrow, wide))
    assert np.array_equal(widen(both, wide)[0], bias[0])
    assert (widen(both, wide)[1, :, :, 3:] < -3e4).all()
