"""The commands, from data to a measured draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from training_targets import make_target
from typer.testing import CliRunner
from vlmexport.calibration.cli import register
from vlmexport.runtime.errors import OptionError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target("blip2-t5", tmp_path_factory.mktemp("cli") / "model").checkpoint.folder


def call(*words: object) -> str:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_from_scenes_to_a_measured_draft(model: Path, tmp_path: Path):
    call(
        "generate-data",
        "--model",
        model,
        "--data",
        "scenes:train:6",
        "-o",
        tmp_path / "data",
        "--max-new-tokens",
        8,
    )
    train = [
        "train", "--model", model, "--draft", "imitation", "--draft-layer", 2, "--data", tmp_path / "data",
        "-o", tmp_path / "run", "--steps", 4, "--batch-size", 3, "--preset", "Our+CS+KD",
        "--cache-features", tmp_path / "cache",
    ]  # fmt: skip
    assert str(tmp_path / "run" / "best") in call(*train)
    before = (tmp_path / "run" / "best" / "draft.safetensors").read_bytes()
    call(*train)  # already complete
    assert (tmp_path / "run" / "best" / "draft.safetensors").read_bytes() == before
    document = json.loads((tmp_path / "run" / "best" / "draft.json").read_text())
    assert document["provenance"]["options"]["kd_distance"] == "reverse"
    assert document["provenance"]["versions"]["torch"]
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert {"loss", "overlap", "agreement"} <= set(log[0]) and log[-1]["kind"] == "validation"
    output = call(
        "eval", "--model", model, "--data", "scenes:heldout:3", "--draft", tmp_path / "run",  # its best/
        "--draft", "early-exit@2", "--max-new-tokens", 8, "--json",
    )  # fmt: skip
    drafts = json.loads(output)["drafts"]
    assert set(drafts) == {str(tmp_path / "run"), "early-exit@2"}
    assert all(0 <= d["alpha"] <= 1 for d in drafts.values())


def test_other_draft_kinds_are_refused(model: Path, tmp_path: Path):
    with pytest.raises(OptionError, match="'medusa' cannot be trained"):
        call(
            "train", "--model", model, "--draft", "medusa", "--draft-layer", 2, "--data", "scenes:train:2",
            "-o", tmp_path,
        )  # fmt: skip
