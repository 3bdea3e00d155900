"""Imitation networks with attention learn from whole texts what the others learn from their rows."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.features.full_sequences import rows_of
from vlmexport.calibration.objectives import objective_for
from vlmexport.calibration.objectives.imitation import AttendingObjective
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training.flags import read_flags, with_option_flags
from vlmexport.calibration.training.run import FeatureCache, source_for, train_draft
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.session.session import Session

from tests.support.every_kind import counted_by_the_runtime, learns_and_resumes
from tests.support.training_targets import KINDS, own_answers

LAYER, NEW = 2, 12


@pytest.fixture(scope="module")
def told(target: Target, records: RecordSet) -> RecordSet:
    """The target's own answers."""
    return own_answers(target, records, NEW)


@pytest.mark.parametrize("target", KINDS, indirect=True)
def test_whole_texts_hold_the_rows_that_are_learned(target: Target, records: RecordSet) -> None:
    """The same places as without attention, in the same order, with the residuals that a fusion joins."""
    own = ImitationOptions(LAYER, cosine=1.0, attention_heads=4)
    assert own.taps(target.num_layers) == (2, 3, 4) and replace(own, cosine=0.0).taps(5) == (2,)
    assert own.whole_texts and not replace(own, attention_heads=0).whole_texts
    some = [records[i] for i in (4, 1, 7)]
    texts = target.texts(some, own.taps(target.num_layers))
    want = target.rows(some, [LAYER])[0]
    places, found = rows_of(texts, LAYER, (2, 3, 4))
    assert int(places.sum()) == len(found) == len(want) > 0
    for name in ("trunk", "residuals"):
        torch.testing.assert_close(getattr(found, name), getattr(want, name), rtol=1e-4, atol=1e-4)
    for name in ("tokens", "records", "positions"):
        assert getattr(found, name).tolist() == getattr(want, name).tolist(), name


@pytest.mark.parametrize(
    "losses", [{}, {"cosine": 1.0, "fusion": "concat"}, {"ce": 0.0, "kd_distance": "tv"}]
)
def test_untrained_attention_has_the_loss_of_the_plain_network(
    target: Target, told: RecordSet, losses: dict
) -> None:
    """Both are the early exit then; every loss is there."""
    indices, found = [3, 0, 5], {}
    for heads in (0, 4):
        own = ImitationOptions(LAYER, attention_heads=heads, **losses)
        torch.manual_seed(0)
        objective = objective_for(own, target)
        assert isinstance(objective, AttendingObjective) == (heads > 0)
        batch = source_for(target, told, own).rows(indices)
        found[heads] = objective.loss(batch, target)[1]
    assert found[0].keys() == found[4].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[4][name], value, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_it_learns_from_depends_on_the_prompt(target: Target, told: RecordSet) -> None:
    own = ImitationOptions(LAYER, attention_heads=4)
    objective = objective_for(own, target)
    for value in objective.network.parameters():
        value.add_(torch.randn(value.shape, generator=torch.manual_seed(1)), alpha=0.1)
    batch = source_for(target, told, own).rows([2])
    before = objective.loss(batch, target)[1]["loss"]
    batch.taps[LAYER][:, 0] *= -1  # a row of the prompt, or the decoder's start token
    after = objective.loss(batch, target)[1]["loss"]
    assert not torch.isclose(before, after)


def test_training_learns_and_resumes_exactly(target: Target, records: RecordSet, tmp_path: Path) -> None:
    learns_and_resumes(target, records, tmp_path, "imitation", attention_heads=4)
    draft = ImitationDraft.load(tmp_path / "whole")
    assert draft.attends and draft.network.attention is not None
    assert draft.network.attention.self_attn.o_proj.weight.abs().max() > 0, "the attention learns, too"


def test_a_draft_of_cached_texts_is_that_of_live_ones(
    target: Target, told: RecordSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the rounding of another batch's padding; the target is not run in a step."""
    own = ImitationOptions(LAYER, cosine=1.0, attention_heads=2)
    loop = LoopOptions(steps=3, batch_size=4, warmup=1, lr=1e-3)

    def weights(name: str, cache: Path | None) -> dict[str, torch.Tensor]:
        draft = train_draft(target, told, own, loop, tmp_path / name, told, FeatureCache(cache, "float32"))
        return dict(draft.network.state_dict())  # type: ignore[attr-defined]

    live, cached = weights("live", None), weights("cached", tmp_path / "cache")
    for name, value in live.items():
        torch.testing.assert_close(cached[name], value, rtol=1e-2, atol=1e-4)
    monkeypatch.setattr(target, "texts", None)
    again = weights("again", tmp_path / "cache")
    assert all(torch.equal(again[name], value) for name, value in cached.items())


def test_unsuitable_values_are_named(target: Target, told: RecordSet, tmp_path: Path) -> None:
    for changes in ({"joint": True}, {"fine_tune": 2}):
        with pytest.raises(OptionError, match="leave --joint and --fine-tune out"):
            ImitationOptions(LAYER, attention_heads=4, **changes)
    with pytest.raises(OptionError, match="--attention-heads must be at least 0, not -1"):
        ImitationOptions(LAYER, attention_heads=-1)
    loop = LoopOptions(steps=1)
    with pytest.raises(OptionError, match="7 attention heads do not divide the width"):
        train_draft(target, told, ImitationOptions(LAYER, attention_heads=7), loop, tmp_path / "a")
    with pytest.raises(OptionError, match=r"--draft-layer 5 is outside 1\.\.4"):
        train_draft(target, told, ImitationOptions(5, attention_heads=4), loop, tmp_path / "b")


def test_a_trained_network_is_built_and_drafts_as_eval_says(
    target: Target, told: RecordSet, tmp_path: Path
) -> None:
    """Parity compares its graph, and what it learned is accepted as often as `eval` counts."""
    run, model = tmp_path / "run", str(target.checkpoint.folder)
    loop = LoopOptions(steps=30, batch_size=6, lr=3e-3, warmup=2)
    train_draft(target, told, ImitationOptions(LAYER, attention_heads=4), loop, run, told)
    length = 3
    found = evaluate_drafts(target, told, [str(run)], draft_length=length, max_new_tokens=NEW)[str(run)]
    report = build_bundle(
        BuildRequest(model=model, output=tmp_path / "b", drafts=[str(run)], max_length=96, draft_layer=LAYER)
    )
    assert f"imitation.{LAYER}" in {row["graph"] for row in report.parity}
    with Session.load(tmp_path / "b") as session:
        counted = counted_by_the_runtime(session, told, "imitation", length, NEW)
    assert counted["chain"] == [found.cycles, found.evaluated, found.accepted] and found.accepted > 0


def test_the_command_has_the_flag() -> None:
    own, _ = read_flags("imitation", {"layer": LAYER, "attention_heads": 2})
    assert isinstance(own, ImitationOptions) and own.attention_heads == 2
    assert ImitationOptions(LAYER).attention_heads == 0

    def command(options: dict[str, object]) -> None:
        """Takes them."""

    flag = inspect.signature(with_option_flags(command)).parameters["attention_heads"]
    (option,) = flag.annotation.__metadata__
    assert "imitation: over the rows of earlier positions, 0 for none" in option.help
    assert option.help.endswith("(default: 0)."), "a layer's default is said, and is no None"
