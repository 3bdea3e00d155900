"""The score of data that nobody named one for: found, left out with a line, or refused before anything is loaded."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner
from vlmexport.calibration.cli import register
from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.data.reading.records import Record
from vlmexport.calibration.evaluation.task import chosen_task, fitting_task
from vlmexport.calibration.targets.threads import with_threads
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.engines.onnxruntime import SINGLE_THREAD_BYTES

from tests.support.training_targets import make_target

LONG = "there is a red cup on the left of the table"


def records(*references: tuple[str, ...], task: str | None = None, mixed: bool = False) -> RecordSet:
    made = [Record(str(i), "?", references=right) for i, right in enumerate(references)]
    return RecordSet("own.jsonl", made, task=task, mixed=mixed)


@pytest.mark.parametrize(
    ("given", "task"),
    [
        (records(()), None),
        (records((), ("red",), ("a cup",)), "exact"),
        (records(("yes",), ("no",)), "exact"),
        (records(("one two three four five",)), "exact"),
        (records(("one two three four five six",)), "captions"),
        (records((LONG,) * 5, ("red",)), "captions"),
        (records(("red",) * 10, ("blue",) * 10), "vqa"),
        (records(("red",) * 10, ("blue",), ("blue",)), "exact"),
        (records((LONG,) * 10), "captions"),
        (RecordSet("r", [Record("a", "?", choices=("b", "c"), choice=1, references=("c",))]), "choices"),
        (RecordSet("r", [Record("a", "?", choices=("b", "c"), references=("c",))]), "exact"),
    ],
)
def test_default_score_follows_the_data(given: RecordSet, task: str | None):
    assert fitting_task(given) == task
    said: list[str] = []
    assert chosen_task("auto", given, True, None, said.append) == task
    assert len(said) == 1 and (f"--task auto: {task}, by" in said[0] if task else "left out" in said[0])


def test_task_of_the_data_decides_first():
    said: list[str] = []
    assert chosen_task("auto", records(("red",), task="vqa"), False, None, said.append) == "vqa"
    assert chosen_task("none", records(("red",), task="vqa"), True, None, said.append) is None
    assert chosen_task("exact", records(("red",), task="vqa"), False, None, said.append) == "exact"
    assert said == []


def test_sets_for_different_scores_have_none(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"question": "?", "answer": "red"}')
    mixed = load_records([str(tmp_path / "a.jsonl"), "scenes:heldout:2"])
    both = load_records(["scenes:heldout:2", "films:heldout:2"])
    assert (mixed.mixed, mixed.task, both.mixed, both.task) == (True, None, False, "captions")
    assert all(part.mixed for part in mixed.split(0.5))
    with pytest.raises(OptionError, match="judged by different scores; give one of captions"):
        chosen_task("auto", mixed, False, None, print)


@pytest.mark.parametrize(
    ("asked", "given", "problem"),
    [
        ("auto", records(()), "no record of own.jsonl has an answer to judge by (in JSONL `answer`"),
        ("auto", records((), task="vqa"), "no record of own.jsonl has an answer to judge by"),
        ("auto", records((), task="choices"), "no record of own.jsonl has choices of which one is right"),
        ("auto", records(("red",), mixed=True), "are judged by different scores"),
        ("exact", records(()), "--task exact: no record of own.jsonl has an answer"),
        ("choices", records(("red",)), "--task choices: no record of own.jsonl has choices"),
    ],
)
def test_a_score_that_is_not_known_leaves_the_drafts(asked: str, given: RecordSet, problem: str):
    said: list[str] = []
    assert chosen_task(asked, given, True, None, said.append) == (None if asked == "auto" else asked)
    assert len(said) == 1 and problem in said[0] and said[0].endswith("left out, the drafts are measured")
    with pytest.raises(OptionError) as caught:
        chosen_task(asked, given, False, None, said.append)
    assert problem in str(caught.value) and "there is no --draft to measure" in str(caught.value)
    assert len(said) == 1


def test_the_package_of_captions_is_asked_for_first(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pycocoevalcap" else found(name)
    )
    said: list[str] = []
    assert chosen_task("auto", records((LONG,)), True, None, said.append) is None
    assert "needs the extra [captions]" in said[0] and "the drafts are measured" in said[0]
    for asked, drafts in (("captions", True), ("auto", False)):
        with pytest.raises(OptionError, match=r"needs the extra \[captions\]"):
            chosen_task(asked, records((LONG,)), drafts, None, said.append)


def test_answers_without_a_score_are_refused():
    with pytest.raises(OptionError, match=r"written where they are judged.*no record of own"):
        chosen_task("auto", records(()), True, Path("x.jsonl"), print)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--task", "auto"], "no record of"),
        (["--task", "taste"], "--task 'taste' is none of"),
        (["--draft", "medusa", "--bundle", "nothing"], "nothing"),
        (["--draft", "medusa", "--strict"], "field `hue` is not read"),
    ],
)
def test_eval_refuses_before_torch_is_imported(words: list[str], problem: str, tmp_path: Path):
    (tmp_path / "own.jsonl").write_text('{"question": "?", "hue": "red"}')
    given = ["eval", "--model", "tiny-vit-gpt2", "--data", str(tmp_path / "own.jsonl"), *words]
    code = (
        f"import sys; from vlmexport.runtime.cli import main; print(main({given!r}), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["2", "False"]
    assert problem in done.stderr.splitlines()[-1] and done.stderr.splitlines()[-1].startswith("vlmexport: ")


def call(*words: object) -> tuple[dict, str]:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_own_questions_are_measured_and_scored(tmp_path: Path):
    model = make_target("llama", tmp_path / "model").checkpoint.folder
    entries = [{"question": "see a cup", "answer": "box"}, {"question": "a blue box", "answer": "cup"}]
    given = [
        "eval",
        "--model",
        model,
        "--draft",
        "early-exit@2",
        "--max-new-tokens",
        6,
        "--task",
        "auto",
        "--json",
    ]
    for name, lines in (("scored", entries), ("bare", [{"question": e["question"]} for e in entries])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        found, said = call(*given, "--data", path)
        assert found["drafts"]["early-exit@2"]["cycles"] > 0
        if name == "scored":
            assert (found["score"]["task"], found["score"]["count"]) == ("exact", 2)
            assert f"--task auto: exact, by the answers of {path}" in said
        else:
            assert found["score"] is None and "the score is left out, the drafts are measured" in said
        assert "answering 2 records, 6 tokens at most, on cpu with 1 thread\n" in said
        assert said.index("answering 2 records") < said.index("answered 2/2 records")


@pytest.mark.parametrize(
    ("asked", "least", "threads"),
    [(None, SINGLE_THREAD_BYTES, 1), (None, 0, 2), (2, SINGLE_THREAD_BYTES, 2), (1, 0, 1)],
)
def test_a_small_model_is_measured_by_one_thread(
    asked: int | None, least: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = make_target("llama", tmp_path / "model")
    monkeypatch.setattr("vlmexport.calibration.targets.threads.SINGLE_THREAD_BYTES", least)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with with_threads(target, asked):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2, "others keep theirs"
    finally:
        torch.set_num_threads(before)
