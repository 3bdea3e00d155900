"""`vlmexport quantize` as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import typer
from typer.testing import CliRunner
from vlmexport import calibration
from vlmexport.calibration.cli import register
from vlmexport.runtime.common.errors import OptionError, VlmexportError

from tests.support.training_targets import make_records, make_target

SCHEMA = Path(calibration.__file__).parent / "schemas" / "quantize-1.json"


def call(*words: object) -> str:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["quantize", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_json_is_what_the_schema_and_the_folder_say(tmp_path: Path):
    """With pictures of scenes: their facts are counted."""
    make_target("blip2-t5", tmp_path / "model")
    data = ("--data", "scenes:train:4", "--validation", "scenes:heldout:2")

    told = call("--model", tmp_path / "model", *data, "-o", tmp_path / "out", "--json", "--samples", 3)

    report = json.loads(told)
    schema = json.loads(SCHEMA.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(report, schema)
    stored = json.loads((tmp_path / "out" / "quantization.json").read_text("utf-8"))
    assert report == {**stored, "output": str(tmp_path / "out")}
    assert report["calibration"]["count"] == 3 and report["held_out"]["count"] == 2
    assert report["quality"]["facts"] is not None


def test_people_are_told_what_it_costs(tmp_path: Path):
    make_target("llama", tmp_path / "model")
    make_records(tmp_path, "llama", 6)

    told = call(
        "--model", tmp_path / "model", "--data", tmp_path / "data.jsonl", "-o", tmp_path / "out",
        "--weights", "int8", "--max-tokens", 3, "--max-loss", 1,
    )  # fmt: skip

    assert "to the float model, best token equal at" in told
    assert "int8" in told and "most sensitive" in told
    assert "in 8 bits for a KL of at most 1: 0 of" in told
    assert told.rstrip().endswith(f"model: {tmp_path / 'out'}")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--weights", "int3"], "'int3' is no kind of weights"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--data", "nothing.jsonl"], "names no data"),
        (["--validation", "nothing.jsonl"], "names no data"),
        (["--method", "awq"], "'awq' is not one of gptq, rounding"),
        (["--max-loss", "-1"], "--max-loss"),
        (["-o", "FULL"], "exists; choose another -o"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from vlmexport.calibration.targets import target

    monkeypatch.setattr(target, "load_target", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    given = {"--model": "tiny-vit-gpt2", "--data": "scenes:train:4", "-o": str(tmp_path / "out")}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    line = [word.replace("FULL", str(tmp_path / "full")) for pair in given.items() for word in pair]

    with pytest.raises(VlmexportError) as error:
        call(*line)

    assert told in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_choice_is_checked_without_torch(monkeypatch: pytest.MonkeyPatch):
    for name in [n for n in sys.modules if n.endswith("quantization.choice")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)

    from vlmexport.exporter.quantization.choice import parse_weights

    with pytest.raises(OptionError):
        parse_weights("int5")
