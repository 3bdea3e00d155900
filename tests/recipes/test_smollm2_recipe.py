"""The SmolLM2 recipe at a size that runs in seconds, on a tiny random Llama."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from vlmexport.calibration.data import load_records
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training.trainer import Trainer
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.runtime.common.errors import OptionError

from recipes import smollm2_draft
from recipes.smollm2_draft import Limits, make_draft, reopen
from recipes.smollm2_prompts import MATTERS, TOPICS, chat_prompts, write
from tests.support.training_targets import make_target

LIMITS = Limits(layer=2, minutes=5, prompts=10, heldout=4, new_tokens=12, steps=30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target("llama", tmp_path_factory.mktemp("smollm2") / "model")


def test_the_prompts_are_many_and_the_held_out_topics_are_new():
    train, heldout = chat_prompts()
    assert chat_prompts() == (train, heldout)
    assert len(train) >= 3000 and len(heldout) >= 300
    assert len({*train, *heldout}) == len(train) + len(heldout)
    held = {topic for topic in TOPICS if f"What is {topic}?" in heldout}
    assert len(held) == len(TOPICS) // 10
    assert not any(f"What is {topic}?" in train for topic in held)
    used = [{m for m in MATTERS if any(f" about {m}." in p for p in side)} for side in (train, heldout)]
    assert used[0] and used[1] and not used[0] & used[1] and used[0] | used[1] == set(MATTERS)


def test_the_prompts_are_data_that_commands_read(tmp_path: Path):
    written = [[record.prompt for record in load_records(str(path)).records] for path in write(tmp_path)]
    assert written == list(chat_prompts())


def test_a_killed_recipe_ends_with_the_same_draft_and_a_finished_one_is_reread(
    model: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(smollm2_draft, "PART", 4)
    source = str(model.checkpoint.folder)
    whole = make_draft(source, tmp_path / "whole", tmp_path / "whole-draft", LIMITS)
    assert whole["answered"] == 10 and whole["steps"] == 30 and whole["heldout"] == 4
    assert set(whole["seconds"]) == {"answers", "cache", "train", "evaluation"}
    account = next((tmp_path / "whole").glob("*/recipe.json"))
    before = account.read_text()
    again = reopen(source, tmp_path / "whole")
    draft = ImitationDraft.load(tmp_path / "whole-draft")
    assert round(again.heldout(2, draft.network).alpha, 5) == whole["alpha"]
    assert account.read_text() == before, "reopening is no work of the recipe's"
    with pytest.raises(OptionError, match="holds no finished run"):
        reopen(source, tmp_path / "nothing")

    answer, train = smollm2_draft._answer, Trainer.train
    calls: list[str] = []

    def dies_in_the_third_piece(*arguments):
        calls.append(arguments[3])
        return answer(*arguments) if len(calls) < 3 else 1 / 0

    monkeypatch.setattr(smollm2_draft, "_answer", dies_in_the_third_piece)
    with pytest.raises(ZeroDivisionError):
        make_draft(source, tmp_path / "killed", tmp_path / "killed-draft", LIMITS)
    monkeypatch.setattr(smollm2_draft, "_answer", answer)

    def dies_in_step_15(self: Trainer):
        train(self, stop_after=15)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "train", dies_in_step_15)
    with pytest.raises(KeyboardInterrupt):
        make_draft(source, tmp_path / "killed", tmp_path / "killed-draft", LIMITS)
    monkeypatch.setattr(Trainer, "train", train)
    killed = make_draft(source, tmp_path / "killed", tmp_path / "killed-draft", LIMITS)
    assert {k: killed[k] for k in ("alpha", "tau", "overlap", "tokens", "early_exit")} == {
        k: whole[k] for k in ("alpha", "tau", "overlap", "tokens", "early_exit")
    }
    weights = [next((tmp_path / f"{run}-draft").glob("*.safetensors")) for run in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    monkeypatch.setattr(smollm2_draft, "_answers", lambda *a: pytest.fail("worked again"))
    assert make_draft(source, tmp_path / "killed", tmp_path / "killed-draft", LIMITS) == killed
    with pytest.raises(OptionError, match=r"new_tokens = 12, this one has 13; give another --work"):
        make_draft(source, tmp_path / "killed", tmp_path / "killed-draft", replace(LIMITS, new_tokens=13))

    answers = next((tmp_path / "whole").glob("*/answers/heldout"))
    told = evaluate_drafts(model, load_records(str(answers)), [str(tmp_path / "whole-draft"), "early-exit@2"])
    found = [round(result.alpha, 5) for result in told.values()]
    assert found == [whole["alpha"], whole["early_exit"]["alpha"]]


def test_the_time_decides_how_many_prompts_and_steps(
    model: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(smollm2_draft, "PART", 4)
    monkeypatch.setattr(smollm2_draft, "LEAST_STEPS", 3)
    smollm2_draft.main(
        ["--model", str(model.checkpoint.folder), "--work", str(tmp_path / "work"), "--out", str(tmp_path / "n2"),
         "--minutes", "0.00001", "--layer", "2", "--heldout", "2", "--new-tokens", "6", "--threads", "1"]
    )  # fmt: skip
    line = json.loads(capsys.readouterr().out)
    assert (line["answered"], line["steps"]) == (4, 3)
    document = json.loads((tmp_path / "n2" / "draft.json").read_text())
    assert document["evaluation"]["heldout"]["alpha"] == line["alpha"]
