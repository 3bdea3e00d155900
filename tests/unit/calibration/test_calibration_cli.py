"""The commands, from data to a measured draft."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
import typer
from typer import rich_utils
from typer.testing import CliRunner
from vlmexport import calibration
from vlmexport.calibration.cli import register
from vlmexport.calibration.data import load_records
from vlmexport.calibration.generation.bundle_answers import BundleAnswers
from vlmexport.calibration.objectives import options_of
from vlmexport.calibration.objectives.training_options import LoopOptions, flag_of
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training.flags import read_flags
from vlmexport.calibration.training.trainer import Trainer
from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
from vlmexport.runtime.common.errors import OptionError

from tests.support.training_targets import make_target

SCHEMAS = Path(calibration.__file__).parent / "schemas"


def call_fails(*words: object) -> str:
    with pytest.raises(OptionError) as caught:
        call(*words)
    return str(caught.value)


def errors(name: str, value: object) -> list[str]:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"].endswith(f":{name}")
    found = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in found]


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
    generate = [
        "generate-data", "--model", model, "--data", "scenes:train:6", "-o", tmp_path / "data",
        "--max-new-tokens", 8, "--shard-size", 4, "--json", "--prompt-suffix", "at length", "--min-answer", 1,
    ]  # fmt: skip
    made, again = json.loads(call(*generate)), json.loads(call(*generate))
    assert errors("generate-data-1", made) == errors("generate-data-1", again) == []
    assert (made["shards"], made["written"], made["answers"], again["written"]) == (2, 2, 6, 0)
    assert made["short"] == 0
    assert all(r.prompt.endswith(" at length") for r in load_records(str(tmp_path / "data")))
    assert made["tokens"] == sum(len(r.tokens) for r in load_records(str(tmp_path / "data")))
    assert made["target"]["fingerprint"] == fingerprint(open_checkpoint(model))
    train = [
        "train", "--model", model, "--draft", "imitation", "--draft-layer", 2, "--data", tmp_path / "data",
        "-o", tmp_path / "run", "--steps", 4, "--batch-size", 3, "--preset", "Our+CS+KD",
        "--cache-features", tmp_path / "cache",
    ]  # fmt: skip
    first = json.loads(call(*train, "--json"))  # one object and nothing else
    assert errors("train-1", first) == []
    assert (first["records"]["count"], first["records"]["bad"], first["validation"]) == (6, 0, None)
    assert (
        first["draft"]["folder"] == str(tmp_path / "run" / "best") and first["draft"]["name"] == "imitation@2"
    )
    assert first["best"]["step"] == 4 and first["best"]["validation"]["loss"] > 0
    before = (tmp_path / "run" / "best" / "draft.safetensors").read_bytes()
    assert str(tmp_path / "run" / "best") in call(*train)  # already complete
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


def test_answers_are_generated_once_for_all_kinds(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One folder of a target's answers teaches every draft: no training asks the target again."""
    made, asked = [], BundleAnswers.answer

    def count(self, records, *more):
        made.extend(record.key for record in records)
        return asked(self, records, *more)

    monkeypatch.setattr(BundleAnswers, "answer", count)
    folder = tmp_path / "data"
    call("generate-data", "--model", model, "--data", "scenes:train:4", "-o", folder, "--max-new-tokens", 8)
    kept = sorted((path.name, path.read_bytes()) for path in folder.iterdir())
    assert len(made) == len(set(made)) == 4

    def refuse(*_):
        raise AssertionError("the target was asked for an answer again")

    monkeypatch.setattr(BundleAnswers, "answer", refuse)
    monkeypatch.setattr(Target, "generate", refuse)
    for kind, own in {"imitation": ["--draft-layer", 2], "medusa": ["--heads", 2], "eagle": []}.items():
        out = tmp_path / kind
        report = json.loads(
            call(
                "train",
                "--model",
                model,
                "--draft",
                kind,
                *own,
                "--data",
                folder,
                "-o",
                out,
                "--steps",
                1,
                "--batch-size",
                2,
                "--json",
            )
        )
        assert report["records"]["count"] == 4 and report["draft"]["folder"] == str(out / "best")
    assert sorted((path.name, path.read_bytes()) for path in folder.iterdir()) == kept


def test_flags_follow_the_options_of_the_loop_and_of_the_kind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 200)  # a narrow table cuts long names
    shown = call("train", "--help")
    for owner in (LoopOptions, options_of("imitation")):
        for one in fields(owner):
            assert flag_of(one.name, one.metadata) in shown, one.name
    start = ["train", "--model", model, "--data", "scenes:train:2", "-o", tmp_path / "x"]
    assert "give --draft-layer" in call_fails(*start)
    assert "--steps must be at least 1, not 0" in call_fails(*start, "--draft-layer", 2, "--steps", 0)
    assert "every loss weight is 0" in call_fails(*start, "--draft-layer", 2, "--ce", 0, "--kd", 0)
    given = {"layer": 2, "residual": False, "lr": 0.5, "seed": None}
    own, loop = read_flags("imitation", given)
    assert (own.to_dict()["residual"], loop.lr, loop.seed) == (False, 0.5, 0)
    with pytest.raises(OptionError, match="--heads does not apply to --draft imitation"):
        read_flags("imitation", {"layer": 2, "heads": 3})
    with pytest.raises(OptionError, match="--draft-layer does not apply to --draft medusa"):
        read_flags("medusa", {"layer": 2})
    assert "--cache-dtype 'int8': choose one of" in call_fails(
        *start, "--draft-layer", 2, "--cache-dtype", "int8"
    )
    here = ["eval", "--model", model, "--data", "scenes:heldout:1"]
    assert "--draft early-exit@99 is outside 1.." in call_fails(*here, "--draft", "early-exit@99")
    assert "--task 'best' is none of auto, none, captions" in call_fails(*here, "--task", "best")


def test_several_data_and_a_limit_for_all(model: Path, tmp_path: Path):
    words = [
        "train", "--model", model, "--draft-layer", 1, "--data", "scenes:train:3:offset=70000",
        "--data", "scenes-questions:train:9:seed=7", "--validation", "scenes:validation:50", "--limit", 4,
        "-o", tmp_path / "run", "--steps", 1, "--batch-size", 2,
    ]  # fmt: skip
    seen, split = [], Trainer.__init__

    def spy(self, build, options, target, source, validation, *more, **named):
        seen.extend([list(source.records), list(validation.records)])
        split(self, build, options, target, source, validation, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "__init__", spy)
        call(*words)
    assert [r.image.scene for r in seen[0]] == [(0, 70000), (0, 70001), (0, 70002), (7, 0)]
    assert [r.key.partition("/")[0] for r in seen[0]] == ["0", "0", "0", "1"]
    assert len(seen[1]) == 4, "--limit is for --validation too"


def test_other_draft_kinds_are_refused(model: Path, tmp_path: Path):
    with pytest.raises(OptionError, match="'prompt-lookup' cannot be trained"):
        call(
            "train", "--model", model, "--draft", "prompt-lookup", "--draft-layer", 2, "--data", "scenes:train:2",
            "-o", tmp_path,
        )  # fmt: skip
