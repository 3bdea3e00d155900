"""The command that evaluates a recipe's model: which drafts it measures, and what it refuses."""

# ruff: noqa: E402 - the imports need what importorskip checks

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vlmexport.exporter.common.tiny_models import tiny_model
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.exporter.drafts.imitation.imitation_network import ImitationNetwork
from vlmexport.runtime.common.errors import ExportError, OptionError

from recipes import evaluate as command
from recipes.common import evaluation
from recipes.common.captioner import Captioner
from recipes.evaluate import imitation_drafts, shipped
from recipes.models import open_captioner

MODEL = tiny_model("tiny-blip2-flant5")
DRAFTS = tiny_model("tiny-blip2-flant5").with_name("drafts")


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return open_captioner(MODEL)


def test_shipped_drafts_are_measured(tmp_path: Path):
    assert [f.name for f in shipped(MODEL)] == ["n3", "n6"]
    assert shipped(MODEL.parent / "drafts" / ".." / MODEL.name) == shipped(MODEL)
    assert shipped(tmp_path) == []


def test_drafts_that_it_cannot_measure_are_refused(captioner: Captioner, tmp_path: Path):
    own = DRAFTS / MODEL.name / "n3"
    found = imitation_drafts([own], MODEL, captioner)
    assert list(found) == ["n3"] and found["n3"].layer == 3
    with pytest.raises(OptionError, match=r"medusa is not measured here; `vlmexport eval`"):
        imitation_drafts([own.parent / "medusa"], MODEL, captioner)
    with pytest.raises(ExportError, match="trained for 'tiny-vit-gpt2'"):
        imitation_drafts([DRAFTS / "tiny-vit-gpt2" / "n3"], MODEL, captioner)
    shutil.copytree(own, tmp_path / "n3")
    with pytest.raises(OptionError, match="a 'n3' already; rename"):
        imitation_drafts([own, tmp_path / "n3"], MODEL, captioner)
    shutil.copytree(own, tmp_path / "early-exit@3")
    with pytest.raises(OptionError, match="a 'early-exit@3' already"):
        imitation_drafts([tmp_path / "early-exit@3"], MODEL, captioner)
    looking_back = ImitationNetwork(captioner.model.config.text_config.d_model, attention_heads=4)
    replace(ImitationDraft.load(own), network=looking_back).save(tmp_path / "attends")
    with pytest.raises(OptionError, match="imitation with attention is not measured here"):
        imitation_drafts([tmp_path / "attends"], MODEL, captioner)


def test_a_model_of_a_folder_has_the_drafts_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        evaluation, "text_alone", lambda *_: dict.fromkeys(("five_gram_perplexity", "prompt_lookup_tau"), 1.0)
    )
    shutil.copytree(MODEL, tmp_path / "model")
    draft, out = DRAFTS / MODEL.name / "n6", tmp_path / "found.json"
    words = [
        "evaluate",
        str(tmp_path / "model"),
        "--scenes",
        "2",
        "--threads",
        "1",
        "--json",
        str(out),
        "--draft",
        str(draft),
    ]
    monkeypatch.setattr(sys, "argv", words)
    command.main()
    found = json.loads(out.read_text())
    assert list(found["drafts"]) == ["early-exit@3", "early-exit@6", "n6"]
    assert "met: facts " in capsys.readouterr().out
    assert found["drafts"]["n6"]["alpha"] > found["drafts"]["early-exit@6"]["alpha"]
    assert found["drafts"]["n6"]["fingerprint"] == ImitationDraft.load(draft).fingerprint
    assert set(found["own_captions"]["entropy"]["by_part"]) == {"fact", "style", "plan"}
