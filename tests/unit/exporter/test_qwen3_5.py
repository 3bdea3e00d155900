"""Qwen3.5: what of a cache the next request goes on from, what stays float32 in float16, and refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.tensorrt.options import check_attention
from vlmexport.runtime import Session, engines
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.common.errors import BundleError, OptionError, UnsupportedModelError

from tests.support import tiny_models

LONG: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "reuse_prompt": True}


@pytest.mark.parametrize("draft", ["none", "prompt-lookup", "early-exit"])
def test_a_request_goes_on_behind_what_states_hold_or_reads_all(
    tiny_bundle: Callable[..., tuple[Path, Path]], draft: str
) -> None:
    """States hold all but what the last cycle accepted: a prompt that leaves the text before is read anew."""
    bundle, _ = tiny_bundle("qwen3.5")
    prompt = [3 + (7 * place) % 90 for place in range(40)]
    options = LONG | ({"draft": draft, "draft_length": 4} if draft != "none" else {"draft": draft})
    with Session.load(bundle) as session, Session.load(bundle) as fresh:

        def asked(ids: list[int]) -> tuple[list[int], int]:
            found = session.generate_tokens(ids, **options)
            assert found.tokens == fresh.generate_tokens(ids, max_new_tokens=12, ignore_eos=True).tokens
            return found.tokens, found.stats.reused_tokens

        tokens, reused = asked(prompt)
        assert reused == 0
        held = session.decoder.states.length(0)
        known = session.decoder.arena.lengths[0]
        assert held < known
        more = [*prompt, *tokens, 5, 6, 7]
        tokens, reused = asked(more)
        assert reused == known
        held = session.decoder.states.length(0)
        tokens, reused = asked([*[*more, *tokens][: held + 1], 9, 9])
        assert reused >= held
        _, reused = asked([*more, 8, 8, 8])
        assert reused == 0, "the text left what states hold"
        assert asked(prompt)[1] == 0


def test_what_computes_with_states_is_float32(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    """In float16 alone weights' products and norms of hidden states are narrow."""
    out = tmp_path / "bundle"
    build_bundle(
        BuildRequest(
            model=str(tiny_checkpoint("qwen3.5")),
            output=out,
            drafts=["none"],
            precision="float16",
            parity=False,
        )
    )
    model = onnx.shape_inference.infer_shapes(
        onnx.load(str(out / "segment.0.onnx"), load_external_data=False)
    )
    graph = model.graph
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    weights = {tensor.name: tensor.data_type for tensor in graph.initializer}
    float32, float16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
    assert kinds["recurrent_state.0"] == kinds["updated_recurrent_state.0"] == float32
    assert kinds["recent_rows.0"] == kinds["updated_recent_rows.0"] == float16
    products = [node for node in graph.node if node.op_type == "MatMul"]
    inner = [node for node in products if not {*node.input} & weights.keys()]
    assert len(inner) > 40 and {kinds[node.output[0]] for node in inner} == {float32}
    assert {kinds[node.output[0]] for node in products if node not in inner} == {float16}
    assert {kinds[n.output[0]] for n in graph.node if n.op_type in ("Exp", "ReduceLogSumExp")} == {float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 is no multiple of linear_num_key_heads=2"),
        ({"linear_conv_kernel_dim": 12}, "linear_conv_kernel_dim=12 is not in 2..9"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types .* are not supported"),
        ({"layer_types": ["linear_attention", "conv", "full_attention"]}, "layer_types .* are not supported"),
    ],
)
def test_configurations_that_are_not_exported(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = tiny_models.checkpoint("qwen3.5", tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UnsupportedModelError, match=message):
        family_for(open_checkpoint(str(folder)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_width": 65}, "--max-width 65: with linear attention it is at most 64"),
        ({"weights": "int8"}, "int8 weights: with linear attention"),
        (
            {"drafts": ["draft-and-verify"], "skip_mlp": [0]},
            "--draft draft-and-verify: layers with linear attention",
        ),
    ],
)
def test_options_that_do_not_go_with_states(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        build_bundle(
            BuildRequest(model=str(tiny_checkpoint("qwen3.5")), output=tmp_path / "bundle", **options)
        )


def test_other_devices_and_plans_are_refused(tiny_bundle: Callable[..., tuple[Path, Path]]) -> None:
    bundle = Bundle.open(tiny_bundle("qwen3.5")[0])
    for device in ("cuda", "tensorrt"):
        with pytest.raises(OptionError, match=f"device '{device}': .* linear attention"):
            engines.create(bundle, device)
    with pytest.raises(OptionError, match="TensorRT plans hold no layers with linear attention"):
        check_attention(bundle.manifest.decoder)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("decoder", "linear_attention"), None),
        (("decoder", "linear_attention", "num_value_heads"), 3),
        (("decoder", "linear_attention", "window"), 20),
        (("decoder", "linear_attention", "key_head_dim"), 0),
        (("decoder", "layer_types"), ["full_attention"] * 3),
    ],
)
def test_a_manifest_that_says_otherwise_is_refused(
    tiny_bundle: Callable[..., tuple[Path, Path]], path: tuple[str, ...], value: object
) -> None:
    document = json.loads((tiny_bundle("qwen3.5")[0] / "manifest.json").read_text("utf-8"))
    part = document
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    with pytest.raises(BundleError):
        Manifest.from_dict(document)
