"""Sublayers that a draft leaves out: who may, what a folder may say, and that no weight is stored twice."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from vlmexport.exporter.common.sizes import parse_layers
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.drafts.layer_skip import DraftAndVerify
from vlmexport.exporter.drafts.selection import select_drafts
from vlmexport.exporter.families.common.layer_skip import Sublayers
from vlmexport.exporter.parity.verify import VerifySettings, verify_bundle
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import ExportError, OptionError

from tests.support import tiny_models


def test_numbers_of_layers() -> None:
    assert Sublayers.of([5, 3], []) == Sublayers((3, 5), ())
    assert Sublayers((0, 2), ()).kept_attention(4) == [1, 3]
    assert parse_layers("3,5, 8", "--skip-mlp") == [3, 5, 8] and parse_layers("", "--skip-mlp") == []
    for given in ([3, 3], [-1], [True], ["1"], [1.0]):
        with pytest.raises(OptionError, match="is no number of a layer, or is given twice"):
            Sublayers.of(given, [])
    with pytest.raises(OptionError, match="--skip-mlp '3;5' is no list of layers"):
        parse_layers("3;5", "--skip-mlp")
    for skip, message in (
        (Sublayers((1,), (4,)), "skipped mlp 4: this decoder has the layers 0..3"),
        (Sublayers((0, 1, 2, 3), ()), "is all there is"),
        (Sublayers(), "no sublayer is skipped"),
    ):
        with pytest.raises(OptionError, match=message):
            skip.check(4)


def test_skipped_sublayers_need_the_draft_choice() -> None:
    skip = Sublayers((3,), (2, 5))
    found = select_drafts("m", None, ["draft-and-verify"], None, 6, skip)
    assert [draft.name for draft in found.drafts] == ["draft-and-verify", "prompt-lookup"]
    assert found.drafts[0].entry("float32") | {"graphs": None} == {
        "name": "draft-and-verify", "kind": "draft-and-verify", "layer": None, "graphs": None, "trained": False,
        "fingerprint": None, "weights_dtype": "float32", "skipped": {"attention": [3], "mlp": [2, 5]},
    }  # fmt: skip
    with pytest.raises(
        OptionError, match="or the folder of a search: vlmexport search --model m --draft draft-and-verify"
    ):
        select_drafts("m", None, ["draft-and-verify"], None, 6)
    for wanted in ([], ["early-exit"]):
        with pytest.raises(OptionError, match="need --draft draft-and-verify"):
            select_drafts("m", None, wanted, None, 6, skip)
    with pytest.raises(OptionError, match=r"this decoder has the layers 0\.\.4"):
        select_drafts("m", None, ["draft-and-verify"], None, 5, skip)


def test_skipped_sublayers_folder_is_validated(tmp_path: Path) -> None:
    target = {"name": "x", "fingerprint": "sha256:1", "num_layers": 6}
    draft = DraftAndVerify(skip=Sublayers((3,), (2, 5)), target=target, evaluation={"held_out": {}})
    draft.save(tmp_path)
    found = open_draft(tmp_path)
    assert found == draft and found.trained and found.fingerprint == draft.fingerprint
    assert {path.name for path in tmp_path.iterdir()} == {"draft.json"}
    found.check_target("x", "sha256:1", 6, 8)
    with pytest.raises(ExportError, match="vlmexport search --model y --draft draft-and-verify"):
        found.check_target("y", "sha256:2", 6, 8)
    with pytest.raises(ExportError, match="does not fit 'x'"):
        found.check_target("x", "sha256:1", 5, 8)
    with pytest.raises(OptionError, match="no weights of its own"):
        found.with_precision("int4")
    document = json.loads((tmp_path / "draft.json").read_text())
    for network in ({}, {"attention": [1]}, {"attention": [1], "mlp": "2"}, {"attention": [1, 1], "mlp": []}):
        (tmp_path / "draft.json").write_text(json.dumps(document | {"network": network}))
        with pytest.raises(ExportError, match=r"draft\.json"):
            open_draft(tmp_path)


@pytest.mark.parametrize("kind", ["llama", pytest.param("blip2-t5", marks=pytest.mark.slow)])
def test_a_bundle_holds_every_weight_once_and_is_compared(kind: str, tmp_path: Path) -> None:
    """The graph has what is left, and nothing else; the weights file is that of a bundle without it. `verify` needs no
    folder: the manifest says what the graph is."""
    layers = {"llama": {"num_hidden_layers": 3}, "blip2-t5": {"num_decoder_layers": 3, "num_layers": 1}}[kind]
    checkpoint = tiny_models.checkpoint(kind, tmp_path / "model", **layers)
    build_bundle(
        BuildRequest(
            model=str(checkpoint), output=tmp_path / "plain", drafts=["none"], parity=False, max_length=64
        )
    )
    request = BuildRequest(
        model=str(checkpoint), output=tmp_path / "bundle", drafts=["draft-and-verify"], skip_attention=[2, 1], skip_mlp=[1],
        max_length=64,
    )  # fmt: skip
    report = build_bundle(request)
    row = next(row for row in report.parity if row["graph"] == "skipped")
    assert row["reference"] == "torch" and row["values"] > 1000
    sizes = [(tmp_path / name / "weights.bin").stat().st_size for name in ("plain", "bundle")]
    assert sizes[0] == sizes[1], "the draft stored weights of its own"
    model = onnx.load(tmp_path / "bundle" / "skipped.onnx", load_external_data=False)
    named = {value.name for value in (*model.graph.input, *model.graph.output)}
    assert {name for name in named if "cache" in name} == {
        f"{prefix}{kind}_cache.0" for prefix in ("", "updated_") for kind in ("key", "value")
    }
    used = " ".join(value.name for value in model.graph.initializer)
    assert ("layers.1." in used or "block.1." in used) is False, "a layer without sublayers has weights"
    assert sum(node.op_type == "Attention" for node in model.graph.node) == (1 if kind == "llama" else 2)
    zeros = [t for t in model.graph.initializer if t.dims == [] and not any(t.raw_data)]
    assert not zeros, "what is left out is added as zeros"
    assert Bundle.open(tmp_path / "bundle").manifest.policy.draft == "draft-and-verify"
    verified = verify_bundle(
        tmp_path / "bundle", str(checkpoint), (), VerifySettings(prompts=1, max_new_tokens=6)
    )
    assert verified.ok and not verified.notes, (verified.failures, verified.notes)
    assert "skipped" in {row["graph"] for row in verified.parity}
