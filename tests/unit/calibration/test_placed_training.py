"""Layers that are given the positions of a model with M-RoPE: whole texts know them, training and `eval` use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.features.full_sequences import unrolled_over_texts
from vlmexport.calibration.features.text_cache import CachedTexts, build_text_cache
from vlmexport.calibration.objectives import objective_for
from vlmexport.calibration.objectives.eagle3_options import Eagle3Options
from vlmexport.calibration.objectives.eagle_options import EagleOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.targets.teacher_forcing import Texts
from vlmexport.calibration.training.run import train_draft
from vlmexport.exporter.drafts.eagle.eagle3 import Eagle3Draft
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.session.session import Session

from tests.support.every_kind import counted_by_the_runtime
from tests.support.training_targets import make_records, make_target, own_answers

NEW = 14


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target("qwen3-vl", tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def answered(placed: Target, tmp_path_factory: pytest.TempPathFactory) -> RecordSet:
    """Records with pictures, and one without, which the model answered."""
    records = list(make_records(tmp_path_factory.mktemp("records"), "qwen3-vl"))
    records[2] = replace(records[2], image=None)
    return own_answers(placed, records, NEW)


def seen(target: Target, told: Sequence[Any]) -> tuple[Texts, Tensor]:
    """The texts, and the positions that the model itself turned into angles."""
    given: list[Tensor] = []
    hook = target.family.parts(target.model).rotary.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda _module, args, named: given.append(
            named["position_ids"] if "position_ids" in named else args[1]
        ),
        with_kwargs=True,
    )
    try:
        return target.texts(told), given[0]
    finally:
        hook.remove()


def test_texts_know_the_models_positions(placed: Target, answered: RecordSet, tmp_path: Path) -> None:
    told = list(answered)[:4]
    texts, given = seen(placed, told)
    assert texts.positions is not None
    for b, length in enumerate(texts.lengths):
        assert torch.equal(texts.positions[:, b, :length], given[:, b, :length]), f"text {b}"
    counting = torch.arange(texts.lengths[2]).expand(3, -1)
    assert torch.equal(texts.positions[:, 2, : texts.lengths[2]], counting), "text alone"
    assert (texts.positions[0] != texts.positions[1]).any() and texts.positions[:, 0].max() < max(
        texts.lengths
    ) - 1
    cached = CachedTexts(build_text_cache(placed, answered, (), tmp_path, "float32"), placed).rows(range(4))
    assert cached.positions is not None and torch.equal(cached.positions, texts.positions)


@torch.no_grad()
def test_unrolled_steps_stand_behind_the_places_own(placed: Target, answered: RecordSet) -> None:
    """Step j of a place stands j behind it on every axis, as in AngelSlim's training; one axis gives other rows."""
    network: Any = objective_for(EagleOptions(positions="model"), placed).network
    generator = torch.Generator().manual_seed(3)
    for value in network.parameters():
        value.add_(torch.randn(value.shape, generator=generator), alpha=0.3)
    texts = placed.texts(list(answered)[:2])
    assert texts.positions is not None
    features = placed.features(texts.hidden)
    first, second = unrolled_over_texts(network, texts, features, 2)
    count = features.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    rows, _ = network(texts.embedded, features, texts.positions, mask)
    torch.testing.assert_close(first, rows)
    for place in (count // 2, count - 2):
        own = torch.cat([features[:, : place + 1], first[:, place : place + 1]], 1)
        at = torch.cat([texts.positions[..., : place + 1], texts.positions[..., place : place + 1] + 1], -1)
        rows, _ = network(
            texts.embedded[:, : place + 2],
            own,
            at,
            torch.ones(place + 2, place + 2, dtype=torch.bool).tril()[None, None],
        )
        torch.testing.assert_close(second[:, place], rows[:, -1], rtol=1e-4, atol=1e-4)
    (counted,) = unrolled_over_texts(network, replace(texts, positions=None), features, 1)
    assert not torch.allclose(counted, first, rtol=1e-2, atol=1e-2)


def test_positions_that_a_model_has_not(target: Target) -> None:
    with pytest.raises(OptionError, match="has no positions with three axes"):
        objective_for(EagleOptions(positions="model"), target)
    with pytest.raises(OptionError, match="unknown --positions 'two'; choose one of counted, model"):
        EagleOptions(positions="two")


def test_figures_are_those_of_the_runtime(placed: Target, answered: RecordSet, tmp_path: Path) -> None:
    """A layer trained with such positions accepts in `eval` what it accepts in a bundle, behind pictures too."""
    options = Eagle3Options(own_steps=2, positions="model")
    loop = LoopOptions(steps=60, lr=3e-3, batch_size=8, warmup=2)
    train_draft(placed, answered, options, loop, tmp_path / "run", answered)
    best = tmp_path / "run" / "best"
    assert Eagle3Draft.load(best).network.config.mrope_interleaved
    found = evaluate_drafts(placed, answered, [str(best)], draft_length=3, max_new_tokens=NEW)[str(best)]
    build_bundle(
        BuildRequest(
            model=str(placed.checkpoint.folder),
            output=tmp_path / "bundle",
            drafts=[str(best)],
            max_length=96,
            parity=False,
        )
    )
    with Session.load(tmp_path / "bundle") as session:
        counted = counted_by_the_runtime(session, answered, "eagle3", 3, NEW)["chain"]
    assert counted == [found.cycles, found.evaluated, found.accepted] and counted[2] > 0
