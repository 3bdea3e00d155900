"""The collection of drafts' figures in `benchmarks/`, of the drafts that ship."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from vlmexport.exporter.common.tiny_models import tiny_model

from benchmarks import draft_figures as script

DRAFTS = tiny_model("tiny-blip2-flant5").with_name("drafts")


def test_every_draft_is_named_with_what_it_reached() -> None:
    found = script.figures(DRAFTS / "tiny-qwen2.5-vl")
    assert set(found["drafts"]) == {"n3", "n6", "medusa", "eagle", "vispec"}
    assert found["target"]["name"] == "tiny-qwen2.5-vl"
    n3 = json.loads((DRAFTS / "tiny-qwen2.5-vl" / "n3" / "draft.json").read_text())
    assert found["drafts"]["n3"]["evaluation"] == n3["evaluation"]
    assert found["drafts"]["n3"]["layer"] == 3 and found["drafts"]["medusa"]["layer"] is None


def test_incompatible_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 targets"):
        script.figures(tmp_path)
    for model in ("tiny-vit-gpt2", "tiny-blip2-flant5"):
        shutil.copytree(DRAFTS / model / "n3", tmp_path / model)
    with pytest.raises(ValueError, match="2 targets"):
        script.figures(tmp_path)
    written = tmp_path / "tiny-vit-gpt2" / "draft.json"
    draft = json.loads(written.read_text())
    del draft["evaluation"]["heldout"]
    written.write_text(json.dumps(draft))
    with pytest.raises(ValueError, match="not measured on held-out data"):
        script.figures(tmp_path)
