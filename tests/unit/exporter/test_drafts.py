"""Draft kinds: which drafts a bundle gets, and draft folders that nobody should trust."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from vlmexport.exporter.common.aliases import find_alias
from vlmexport.exporter.drafts import KINDS, draft_kinds, selection
from vlmexport.exporter.drafts.folders import open_draft, shipped_drafts
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft, ImitationNetwork
from vlmexport.exporter.drafts.selection import DraftSelection, select_drafts
from vlmexport.runtime.common.errors import ExportError, OptionError

SHIPPED = find_alias("tiny-blip2-flant5")


def chosen(*wanted: str, layer: int | None = None, layers: int = 12, alias: Any = None) -> DraftSelection:
    return select_drafts("model", alias, wanted, layer, layers)


def names(selection: DraftSelection) -> list[str]:
    return [draft.name for draft in selection.drafts]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A draft at layer 1 for a target of width 8."""
    network = ImitationNetwork(8, 1, "silu", "rms_norm", residual=False)
    ImitationDraft(network=network, layer=1, target={"name": "x", "fingerprint": "sha256:1"}).save(
        tmp_path / "n1"
    )
    return tmp_path / "n1"


def test_every_kind_is_what_its_registry_line_says() -> None:
    kinds = draft_kinds()
    assert [kind.name for kind in kinds] == list(KINDS)
    for kind in kinds:
        assert kind.title and kind.draft_length >= 1
        if not kind.trained:
            draft = kind.at(2 if kind.has_layer else None)
            assert (draft.kind, draft.trained, draft.graph_names()) == (kind.name, False, {})
            assert (draft.layer is not None) == kind.has_layer
            with pytest.raises(ExportError, match="not trained"):
                kind.load(Path("x"))


def test_shipped_draft_is_the_default() -> None:
    heads = chosen(alias=SHIPPED)  # no cut, one pass per cycle
    assert names(heads) == ["medusa", "prompt-lookup"] and heads.cuts(12) == [0, 12]
    assert heads.default is heads.drafts[0] and heads.speculative and not heads.notices
    for layer, name in ((3, "imitation@3"), (6, "imitation@6")):
        found = chosen(layer=layer, alias=SHIPPED)
        cut = int(name.partition("@")[2])
        assert names(found) == [name, f"early-exit@{cut}", "prompt-lookup"]
        assert found.default is found.drafts[0] and found.speculative and not found.notices
        assert found.cuts(12) == [0, cut, 12]


def test_without_a_trained_draft_prompt_lookup_is_the_default() -> None:
    for layer, cut in ((None, 4), (5, 5)):
        for alias in (None, SHIPPED) if layer else (None,):
            found = chosen(layer=layer, alias=alias)
            assert names(found) == [f"early-exit@{cut}", "prompt-lookup"]
            assert found.default is found.drafts[1] and found.speculative
            assert f"no trained draft for model at layer {cut}: prompt-lookup" in found.notices[0]
            assert f"--draft imitation --draft-layer {cut}" in found.notices[0]
    alone = chosen(layers=1)  # nothing to cut
    assert names(alone) == ["prompt-lookup"] and alone.cuts(1) == [0, 1]


def test_shipped_drafts_without_a_layer_follow_kind_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Folders are sorted by name, which puts "eagle" before "medusa"."""
    heads = next(draft for draft in shipped_drafts(SHIPPED) if draft.kind == "medusa")
    layer = copy.copy(heads)
    layer.kind = "eagle"  # type: ignore[misc]
    monkeypatch.setattr(selection, "shipped_drafts", lambda alias: [layer, heads, *shipped_drafts(alias)[:2]])
    assert chosen(alias=SHIPPED).default is heads


def test_a_kind_without_a_layer_needs_no_cut() -> None:
    found = chosen("prompt-lookup")
    assert names(found) == ["prompt-lookup"] and found.cuts(12) == [0, 12] and found.draft_length == 4
    cut = chosen("prompt-lookup", layer=3)
    assert names(cut) == ["early-exit@3", "prompt-lookup"] and cut.cuts(12) == [0, 3, 12]
    assert cut.default is cut.drafts[1]


def test_the_first_draft_named_is_the_default_and_untrained_ones_join(folder: Path) -> None:
    found = chosen("early-exit", str(folder), layer=1)
    assert names(found) == ["imitation@1", "early-exit@1", "prompt-lookup"]
    assert found.default is found.drafts[1]
    both = chosen("imitation", str(folder), alias=SHIPPED)
    assert names(both) == ["imitation@3", "imitation@1", "early-exit@1", "early-exit@3", "prompt-lookup"]
    assert both.default is both.drafts[0] and both.cuts(12) == [0, 1, 3, 12]
    none = chosen("none", alias=SHIPPED)
    assert (none.drafts, none.default, none.speculative, none.cuts(12)) == ([], None, False, [0, 12])


def test_invalid_draft_choices_are_named(folder: Path) -> None:
    for wanted, layer, match in (
        ([str(folder)], 2, r"--draft-layer 2 matches none of the drafts \(imitation@1\)"),
        (["prompt-lookup", "prompt-lookup"], None, "draft prompt-lookup is given twice"),
        (["none", "prompt-lookup"], None, "excludes"),
        (["imitation"], 5, "no trained imitation draft for model at layer 5"),
        (["lookup"], None, "'lookup' is neither a kind"),
        (["early-exit"], 12, "12 is out of range"),
    ):
        with pytest.raises(OptionError, match=match):
            chosen(*wanted, layer=layer)


def test_folders_are_opened_by_what_they_hold(folder: Path) -> None:
    draft = open_draft(folder)
    assert (draft.name, draft.trained) == ("imitation@1", True)
    assert draft.entry("float16") == {
        "name": "imitation@1", "kind": "imitation", "layer": 1, "graphs": {"imitation": "imitation.1"},
        "trained": True, "fingerprint": draft.fingerprint, "weights_dtype": "float16",
    }  # fmt: skip
    run = folder.parent / "run"
    run.mkdir()
    folder.rename(run / "best")
    assert open_draft(run).fingerprint == draft.fingerprint
    for alias in (SHIPPED, find_alias("tiny-vit-gpt2")):
        assert [d.name for d in shipped_drafts(alias)] == ["imitation@3", "imitation@6", "medusa"]


def _nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kind": "phantom"},
            "of kind 'phantom'; this version knows imitation, medusa, eagle, eagle3, vispec",
        ),
        ({"kind": "early-exit"}, "of kind 'early-exit'; this version knows imitation, medusa"),
        ({"kind": "medusa"}, "of kind 'medusa' at layer 1, not 'medusa' without a layer"),
        ({"kind": 3}, "field 'kind' is 3"),
        ({"layer": True}, "field 'layer' is True"),
        ({"layer": None}, "at layer None, not 'imitation' at a layer"),
        ({"schema_version": 2}, "schema version 2"),
        ({"network": {"hidden_size": 10**12}}, "hidden size in 1..131072, not 1000000000000"),
        ({"network": {"hidden_size": 10**400}}, "hidden size in 1..131072"),
        ({"network": {"hidden_size": 65536}}, "cannot be read: .*tensor"),
        ({"network": {"hidden_size": "8"}}, "hidden size in 1..131072, not '8'"),
        ({"network": {"hidden_size": 8, "num_linear": 10**9}}, "1 or 2 linear layers"),
        ({"network": {"hidden_size": 8, "activation": []}}, "draft.json"),
        ({"network": {"hidden_size": 8, "heads": 2}}, "heads"),
        (
            {"network": {"hidden_size": 8, "attention_heads": 3}},
            "3 attention heads do not divide the width 8",
        ),
        ({"network": {"hidden_size": 8, "attention_heads": "2"}}, "0 or more attention heads, not '2'"),
        ({"network": {}}, "hidden_size"),
        ({"provenance": 3}, "field 'provenance'"),
    ],
)
def test_wrong_draft_description_is_one_line(folder: Path, change: dict[str, Any], message: str) -> None:
    document = json.loads((folder / "draft.json").read_text())
    (folder / "draft.json").write_text(json.dumps(document | change))
    with pytest.raises(ExportError, match=message) as caught:
        open_draft(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 + len(str(folder))


@pytest.mark.parametrize("name", ["format", "schema_version", "kind", "layer", "network", "target"])
def test_a_description_without_a_field_names_it(folder: Path, name: str) -> None:
    document = json.loads((folder / "draft.json").read_text())
    del document[name]
    (folder / "draft.json").write_text(json.dumps(document))
    with pytest.raises(ExportError, match=name.replace("schema_version", "schema version")):
        open_draft(folder)


@pytest.mark.parametrize("name", ["draft.json", "draft.safetensors"])
@pytest.mark.parametrize("what", ["pipe", "folder", "empty", "binary", "nested", "missing"])
def test_a_damaged_folder_costs_one_line(folder: Path, name: str, what: str) -> None:
    path = folder / name
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what != "missing":
        path.write_bytes({"empty": b"", "binary": b"\xff\x00" * 40, "nested": _nested(10**5).encode()}[what])
    with pytest.raises(ExportError, match=r"draft\.|cannot be read") as caught:
        open_draft(folder)
    assert "\n" not in str(caught.value)


def test_an_absurdly_long_description_is_not_read(folder: Path) -> None:
    with (folder / "draft.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ExportError, match="has more than 16 MiB; no such file is so long"):
        open_draft(folder)


def test_save_and_load_round_trip(folder: Path, tmp_path: Path) -> None:
    network = ImitationNetwork(8)
    torch.nn.init.normal_(network.linear[-1].weight)  # type: ignore[arg-type]
    draft = ImitationDraft(network=network, layer=1, target={"name": "x", "fingerprint": "sha256:1"})
    for dtype, tolerance in ((torch.float32, 0.0), (torch.float16, 2e-3)):
        draft.save(tmp_path / "again", dtype)
        loaded = ImitationDraft.load(tmp_path / "again")
        rows = torch.randn(2, 8)
        torch.testing.assert_close(loaded.network(rows), network(rows), rtol=tolerance, atol=tolerance)
        assert all(v.dtype == torch.float32 for v in loaded.network.state_dict().values())
        assert (loaded.fingerprint == draft.fingerprint) == (dtype == torch.float32)
