"""Parity finds wrong graphs, and passes right ones, whole and layer by layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.cli.tables import parity_table
from vlmexport.exporter.common.float64 import float64_arithmetic
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity import check_parity
from vlmexport.exporter.parity.capture import capture
from vlmexport.exporter.parity.first_tokens import chained_logits, compare_first_tokens
from vlmexport.exporter.parity.generation import first_difference
from vlmexport.exporter.parity.recorded import compared_inputs
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.exporter.parity.runner import GraphRunner
from vlmexport.exporter.parity.tally import FLOOR, SHARE, Tally
from vlmexport.runtime.bundle.float32_view import as_float32
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.manifest_file import MANIFEST, read_manifest
from vlmexport.runtime.common.errors import ExportError

from tests.support.pairs import each_value

WHOLE, BY_LAYER = "whole", "layer-by-layer"
MEMORY = {WHOLE: 1 << 40, BY_LAYER: 0}
"""Bytes that parity may take."""


@each_value(
    name=[
        "llama",
        "llama-tied",
        "t5",
        "blip2-t5",
        "llava",
        "llava-next",
        "qwen2.5-vl",
        "qwen3-vl",
        "qwen3.5",
        "gemma3",
        "paligemma2",
        "internvl",
        "smolvlm",
    ],
    memory=[*MEMORY],
)
def test_correct_bundle_passes_parity(tiny_bundle: Callable, name: str, memory: str) -> None:
    bundle, checkpoint = tiny_bundle(name)
    before = sorted(p.name for p in bundle.iterdir())
    entries = check_parity(bundle, open_checkpoint(checkpoint), memory_limit=MEMORY[memory])
    graphs = json.loads((bundle / "manifest.json").read_text("utf-8"))["graphs"]
    compared = {e["graph"] for e in entries}
    end = {"generation"} if memory == WHOLE else {"first tokens"}
    assert compared == set(graphs) | {"preparation"} | end
    assert all(e["relative_difference"] <= e["limit"] for e in entries)
    assert all(e["values"] > 0 for e in entries)
    assert all(e.get("streamed", False) == (memory == BY_LAYER) for e in entries)
    assert sorted(p.name for p in bundle.iterdir()) == before
    parity_table(entries)


CONFIGURATIONS = {
    "gemma3": [
        {
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "attention_bias": True,
            "rows": 4,
            "num_key_value_heads": 3,
        },
        {"tied": False, "head_dim": 16, "num_attention_heads": 6, "image_side": 24, "rows": 9},
    ],
    "gemma3-text": [{"num_hidden_layers": 3, "tie_word_embeddings": False}, {}],
    "paligemma2": [
        {
            "num_hidden_layers": 3,
            "sliding_window": 4,
            "attention_bias": True,
            "num_key_value_heads": 3,
            "attn_logit_softcapping": 0.8,
        },
        {
            "tied": False,
            "head_dim": 16,
            "num_attention_heads": 6,
            "image_side": 24,
            "final_logit_softcapping": None,
        },
        {"attn_logit_softcapping": None, "query_pre_attn_scalar": 32},
    ],
    "paligemma": [{"num_hidden_layers": 3, "tied": False, "attention_bias": True}, {}],
    "blip2-opt": [{}, {"tied": False, "enable_bias": False}],
    "vit-gpt2": [
        {},
        {"tied": False, "vision_width": 96, "scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False, "n_inner": 64, "activation_function": "relu"},
    ],
    "qwen2.5-vl": [
        {"window_size": 28, "full": (), "tied": True, "num_attention_heads": 6, "sections": (2, 4, 2)},
        {"window_size": 112, "full": (0, 2), "num_key_value_heads": 3, "sections": (8, 4, 4)},
    ],
    "qwen2-vl": [{"tied": True, "num_attention_heads": 6, "sections": (2, 4, 2)}],
    "qwen3-vl": [
        {"deep": (0, 1, 2), "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        {"deep": (), "tied": True},
    ],
    "qwen3.5": [
        {
            "layer_types": ("full_attention", "linear_attention"),
            "tied": True,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        {
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
            "sections": (1, 2, 1),
        },
    ],
    "llava-next": [
        {
            "image_side": 24,
            "patch_size": 8,
            "feature_layer": 1,
            "tied": True,
            "canvases": ((1, 4), (2, 2), (4, 1)),
        },
        {"image_side": 20, "patch_size": 8, "activation": "linear", "canvases": ((1, 1),)},
    ],
    "internvl": [
        {
            "language": "llama",
            "tied": True,
            "feature_layer": 2,
            "vision": {"use_absolute_position_embeddings": False},
        },
        {
            "language": "qwen3",
            "downsample_ratio": 0.25,
            "vision": {
                "norm_type": "rms_norm",
                "use_qk_norm": True,
                "attention_bias": True,
                "use_mean_pooling": False,
                "hidden_act": "gelu_pytorch_tanh",
            },
        },
    ],
    "lfm2": [
        {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"], "conv_L_cache": 2},
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "conv"], "conv_bias": True},
    ],
    "lfm2-vl": [
        {"tied": False, "normed": False, "num_attention_heads": 6, "num_key_value_heads": 2, "table_side": 6},
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "image": {"use_thumbnail": False, "max_tiles": 6},
        },
    ],
    "llava": [{"strategy": "full", "feature_layer": 1, "tied": True}, {"activation": "linear"}],
    "qwen2": [
        {},
        {
            "tie_word_embeddings": False,
            "num_key_value_heads": 3,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
    "qwen3": [
        {},
        {"tie_word_embeddings": False, "num_key_value_heads": 3, "head_dim": 16, "attention_bias": True},
    ],
    "smolvlm": [
        {"kind": "idefics3", "image_side": 24, "scale_factor": 3, "longest": 72, "tied": True},
        {"image_side": 28, "patch_size": 14, "scale_factor": 1, "longest": 41, "attention_bias": True},
    ],
}
"""Changes of a tiny checkpoint, each with options that change its graphs."""
SLOW = ("gemma3-text", "lfm2", "paligemma")
"""In `make test-all` alone: another configuration has the same layers."""
ONCE = ("vit-gpt2", "qwen2.5-vl")
"""Compared layer by layer in every run of the tests, the others in `make test-all`: the code that does it knows no family."""


@pytest.mark.parametrize(
    ("name", "changes", "memory"),
    [
        pytest.param(
            name,
            changes,
            memory,
            marks=()
            if changes is found[-1] and (memory or name in ONCE) and name not in SLOW
            else pytest.mark.slow,
        )
        for name, found in CONFIGURATIONS.items()
        for changes in found
        for memory in (1 << 40, 0)
    ],
    ids=lambda value: (
        {1 << 40: "whole", 0: "layer-by-layer"}[value]
        if isinstance(value, int)
        else value
        if isinstance(value, str)
        else "+".join(value) or "plain"
    ),
)
def test_graphs_with_other_options_pass(tiny_bundle: Callable, name: str, changes: dict, memory: int) -> None:
    bundle, checkpoint = tiny_bundle(name, **changes)
    entries = check_parity(bundle, open_checkpoint(checkpoint), memory_limit=memory)
    graphs = json.loads((bundle / "manifest.json").read_text("utf-8"))["graphs"]
    assert {e["graph"] for e in entries} == {
        *graphs,
        "preparation",
        "generation" if memory else "first tokens",
    }
    assert all(e["values"] > 0 for e in entries)


@each_value(graph=["segment.1", "head", "encoder", "cross_kv"], memory=[*MEMORY])
def test_a_wrong_weight_fails(tiny_bundle: Callable, tmp_path: Path, graph: str, memory: str) -> None:
    source, checkpoint = tiny_bundle("blip2-t5")
    bundle = Path(shutil.copytree(source, tmp_path / "bundle"))
    _spoil(bundle, graph)
    with pytest.raises(ExportError, match=rf"parity failed: {graph} differs from torch by "):
        check_parity(bundle, open_checkpoint(checkpoint), generation=False, memory_limit=MEMORY[memory])


def _spoil(bundle: Path, graph: str) -> None:
    """Moves one weight of a graph by 0.01 %."""
    model = onnx.load(str(bundle / f"{graph}.onnx"), load_external_data=False)
    tensor = max((t for t in model.graph.initializer if t.external_data), key=lambda t: np.prod(t.dims))
    place = {e.key: int(e.value) for e in tensor.external_data if e.key != "location"}
    with (bundle / "weights.bin").open("r+b") as file:
        file.seek(place["offset"])
        values = np.frombuffer(file.read(place["length"]), np.float32) * np.float32(1.0001)
        file.seek(place["offset"])
        file.write(values.tobytes())


@pytest.mark.parametrize("slot", ["attn_mask", "write_indices"])
def test_a_graph_that_ignores_its_mask_or_position_fails(
    tiny_bundle: Callable, tmp_path: Path, slot: str
) -> None:
    source, checkpoint = tiny_bundle("llama")
    bundle = Path(shutil.copytree(source, tmp_path / "bundle"))
    path = bundle / "segment.0.onnx"
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        if slot == "attn_mask" and node.op_type == "Attention":
            del node.input[3:]
        if slot == "write_indices" and node.op_type == "TensorScatter":
            del node.input[2:]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match=r"parity failed: segment\.0"):
        check_parity(bundle, open_checkpoint(checkpoint), generation=False)


def test_pictures_that_the_runtime_prepares_otherwise_fail(tiny_bundle: Callable, tmp_path: Path) -> None:
    """Every graph is right; the manifest names another mean than the model's own processor uses."""
    source, checkpoint = tiny_bundle("blip2-t5")
    bundle = Path(shutil.copytree(source, tmp_path / "bundle"))
    manifest = json.loads((bundle / "manifest.json").read_text("utf-8"))
    manifest["image"]["mean"][1] += 0.01
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ExportError, match="parity failed: preparation differs from transformers"):
        check_parity(bundle, open_checkpoint(checkpoint), generation=False)


def test_prompts_that_the_runtime_lays_out_otherwise_fail(tiny_bundle: Callable, tmp_path: Path) -> None:
    source, checkpoint = tiny_bundle("vit-gpt2")
    bundle = Path(shutil.copytree(source, tmp_path / "bundle"))
    manifest = json.loads((bundle / "manifest.json").read_text("utf-8"))
    manifest["text"]["decoder_start_token_id"] = 3
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ExportError, match=r"the runtime's decoder's prompt of .* is \[3, "):
        check_parity(bundle, open_checkpoint(checkpoint), generation=False)


def test_a_graph_that_ignores_learned_positions_fails(tiny_bundle: Callable, tmp_path: Path) -> None:
    source, checkpoint = tiny_bundle("blip2-opt")
    bundle = Path(shutil.copytree(source, tmp_path / "bundle"))
    path = bundle / "segment.0.onnx"
    model = onnx.load(str(path), load_external_data=False)
    (add,) = (
        n for n in model.graph.node if n.op_type == "Add" and "positions/" in n.name and "hidden" in n.input
    )
    add.input[:] = ["hidden", "hidden"]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match=r"parity failed: segment\.0"):
        check_parity(bundle, open_checkpoint(checkpoint), generation=False)


def test_generation_is_compared_with_transformers(
    tiny_bundle: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime that emits another token is caught although every graph is right."""
    from vlmexport.runtime.session.session import Session

    bundle, checkpoint = tiny_bundle("llama")
    original = Session.generate

    def wrong(self: Session, *args: object, **options: object) -> object:
        result = original(self, *args, **options)  # type: ignore[arg-type]
        result.tokens[2] += 1
        return result

    monkeypatch.setattr(Session, "generate", wrong)
    with pytest.raises(ExportError, match="greedy output differs from transformers' at token 2"):
        check_parity(bundle, open_checkpoint(checkpoint))


def test_nan_fails_parity() -> None:
    for found, expected in (
        (np.array([1.0, np.nan]), np.array([1.0, 1.0])),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.array([np.inf]), np.array([1.0])),
        (np.array([1e-30]), np.array([0.0])),
    ):
        tally = Tally()
        tally.add("rows", np.ones(3), np.ones(3))
        tally.add("keys", found, expected)
        assert not tally.row("graph", "torch", "random", share=SHARE, floor=FLOOR).ok


def test_tolerance_follows_float32_rounding() -> None:
    """Where PyTorch itself is 1e-3 off, 4e-3 will do, and 1e-5 does not where it is right."""
    exact, error = np.full(4, 2.0), np.array([1e-3, 0, 0, 0], np.float32)
    for kind, off, ok in (
        ("lossy", 3.9e-3, True),
        ("lossy", 4.1e-3, False),
        ("right", 1e-6, True),
        ("right", 1e-5, False),
    ):
        tally = Tally()
        tally.add("lossy", exact + (off if kind == "lossy" else 0), exact + error, error)
        tally.add("right", exact + (off if kind == "right" else 0), exact, np.zeros(4, np.float32))
        row = tally.row("graph", "torch", "random", share=SHARE, floor=FLOOR)
        assert row.ok == ok, (kind, off, row)
        if not ok:
            assert row.max_abs_difference == pytest.approx(off)


@pytest.mark.parametrize("error", [3.0, np.inf, np.nan])
def test_a_reference_that_is_broken_lets_nothing_pass(error: float) -> None:
    """A limit that follows PyTorch's distance from float64 would let anything pass where that distance is wrong."""
    exact = np.full(4, 2.0)
    tally = Tally()
    tally.add("rows", exact, exact, np.full(4, error, np.float32))
    assert not tally.row("graph", "torch", "random", share=SHARE, floor=FLOOR).ok


def test_parts_run_in_float64_where_their_code_asks_for_float32() -> None:
    """A norm and a softmax that convert to float32 lose nothing there."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(5, 64, generator=generator, dtype=torch.float64) * 30

    def written(x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.nn.functional.softmax(8 * x, dim=-1, dtype=torch.float32)

    exact = 8 * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
    exact = torch.exp(exact - exact.max(-1, keepdim=True).values)
    exact /= exact.sum(-1, keepdim=True)
    with float64_arithmetic():
        found = written(rows)
    assert found.dtype == torch.float64 and torch.get_default_dtype() == torch.float32
    assert (found - exact).abs().max() < 1e-15
    assert (written(rows) - exact).abs().max() > 1e-9


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


def test_the_streamed_reference_holds_no_weights_and_agrees(tiny_checkpoint: Callable) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    whole, streamed = (load_reference(checkpoint, streamed=s) for s in (False, True))
    assert all(p.is_meta or not p.numel() for p in streamed.parameters())
    ids = torch.arange(5, 14)[None]
    with torch.no_grad():
        assert torch.equal(whole(ids).logits, streamed(ids).logits)
    assert all(p.is_meta or not p.numel() for p in streamed.parameters())


def test_pieces_equal_the_whole_graph(tiny_bundle: Callable) -> None:
    bundle = tiny_bundle("blip2-t5")[0]
    pixels = np.random.default_rng(1).standard_normal((1, 3, 32, 32), np.float32)
    whole, pieces = (
        GraphRunner(bundle, piecewise=p).run("vision.onnx", {"pixel_values": pixels})["image_rows"]
        for p in (False, True)
    )
    assert np.abs(whole - pieces).max() < 1e-5


@pytest.mark.parametrize(
    "name",
    ["llama", "t5", "blip2-t5", "blip2-opt", "vit-gpt2", "llava", "qwen2.5-vl", "gemma3", "paligemma2"],
)
def test_the_graphs_one_behind_the_other_give_the_models_first_tokens(
    tiny_bundle: Callable, name: str
) -> None:
    """What layer-by-layer parity compares in place of a generation; a token that differs clearly is refused."""
    folder, checkpoint_folder = tiny_bundle(name)
    checkpoint = open_checkpoint(checkpoint_folder)
    opened = Bundle(folder, Manifest.from_dict(read_manifest(folder / MANIFEST)))
    bundle = Bundle(folder, as_float32(opened.manifest))
    family = family_for(checkpoint)
    model = load_reference(checkpoint, bundle.manifest.weights_dtype, streamed=True)
    *_, (kind, inputs) = compared_inputs(family, 12, streamed=True)
    captured = capture(model, family, kind, bundle.manifest.decoder.cuts, inputs)
    runner = GraphRunner(folder, piecewise=False)
    found = chained_logits(bundle, runner, family, captured, 5)
    np.testing.assert_allclose(found, captured.logits[0, -5:], rtol=1e-3, atol=2e-3)
    assert compare_first_tokens(bundle, runner, family, captured, 5).values == 5
    best = captured.logits[0, -3].argmax()
    captured.logits[0, -3, (best + 1) % captured.logits.shape[-1]] = captured.logits[0, -3, best] + 0.01
    with pytest.raises(ExportError, match=f"the bundle's first token is {best}"):
        compare_first_tokens(bundle, runner, family, captured, 5)
