"""An EAGLE-3 layer in training: its loss, what it learns from, and the figures of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.features.full_sequences import unrolled
from vlmexport.calibration.objectives import objective_for
from vlmexport.calibration.objectives.eagle3 import Eagle3Objective
from vlmexport.calibration.objectives.eagle3_options import Eagle3Options
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training.run import train_draft
from vlmexport.exporter.drafts.eagle.eagle3 import Eagle3Draft
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.session.session import Session

from tests.support.every_kind import counted_by_the_runtime
from tests.support.training_targets import own_answers

NEW = 14


@pytest.fixture(scope="module")
def told(target: Target, records: RecordSet) -> RecordSet:
    """The target's own answers."""
    return own_answers(target, records, NEW)


def test_the_loss_is_that_of_training_time_test(target: Target, told: RecordSet) -> None:
    """Σ 0.8^j of the cross entropy with the target's distribution over the draft's tokens, at places whose likeliest token
    is one of these."""
    words = target.vocabulary
    options = Eagle3Options(head="trimmed", head_vocabulary=words // 2, own_steps=1)
    counts = torch.arange(words).flip(0)
    objective = objective_for(options, target, lambda: counts)
    assert isinstance(objective, Eagle3Objective)
    network = objective.network
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in network.parameters():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.05)
    texts = target.texts(list(told)[:4], options.taps(target.num_layers))
    objective.eval()
    total, parts = objective.loss(texts, target)  # type: ignore[arg-type]
    given = network.fused(*(texts.taps[tap] for tap in network.config.taps or ()))
    features, learned, wanted = target.features(texts.hidden), texts.learned, 0.0
    for step, rows in enumerate(unrolled(network, texts.embedded, given, 2)):
        losses = []
        for b, place in learned.nonzero().tolist():
            if step and not learned[b, place + 1]:
                continue
            p = target.lm_head(features[b, place + 1 + step])
            if p.argmax() not in network.d2t:
                continue
            q = network.head(network.norm(rows[b, place])).log_softmax(-1)
            losses.append(-(p[network.d2t].softmax(-1) * q).sum())
        assert len(losses) > 3
        wanted += 0.8**step * torch.stack(losses).mean().item()
    assert total.item() == pytest.approx(wanted, rel=1e-4)
    assert {"tokens", "hit1", "hit2", "loss"} == set(parts)


def test_rows_after_layers_are_the_models(target: Target, told: RecordSet) -> None:
    """What `texts` gives of layer L is what it gives of the last one; of others, what enters the next layer."""
    texts = target.texts(list(told)[:2], [1, target.num_layers])
    torch.testing.assert_close(texts.taps[target.num_layers], texts.hidden)
    assert not torch.equal(texts.taps[1], texts.hidden)


def test_figures_are_those_of_the_runtime(target: Target, told: RecordSet, tmp_path: Path) -> None:
    """A layer that has learned something accepts in `eval` what it accepts in a bundle."""
    options = Eagle3Options(own_steps=2)
    loop = LoopOptions(steps=60, lr=3e-3, batch_size=8, warmup=2)
    train_draft(target, told, options, loop, tmp_path / "run", told)
    best = tmp_path / "run" / "best"
    draft = Eagle3Draft.load(best)
    assert draft.network.config.taps == options.taps(target.num_layers)
    found = evaluate_drafts(target, told, [str(best)], draft_length=3, max_new_tokens=NEW)[str(best)]
    build_bundle(
        BuildRequest(
            model=str(target.checkpoint.folder),
            output=tmp_path / "bundle",
            drafts=[str(best)],
            max_length=96,
            parity=False,
        )
    )
    with Session.load(tmp_path / "bundle") as session:
        counted = counted_by_the_runtime(session, told, "eagle3", 3, NEW)["chain"]
    assert counted == [found.cycles, found.evaluated, found.accepted] and counted[2] > 0


def test_options_that_do_not_fit_are_named() -> None:
    for options, message in (
        ({"head": "shared"}, "a norm and a head of its own"),
        ({"tap_layers": "1,2"}, "are not three numbers"),
        ({"own_steps": -1}, "--own-steps must be at least 0"),
    ):
        with pytest.raises(OptionError, match=message):
            Eagle3Options(**options)
    assert Eagle3Options(tap_layers="1,2,2").taps(4) == (1, 2, 2)
    with pytest.raises(OptionError, match=r"do not rise within 1\.\.3"):
        Eagle3Options(tap_layers="2,1,3").taps(4)
