"""Trainings of drafts that learn from whole texts: ViSpec's in two stages, of half of the steps each, others in one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.objectives.training_options import LoopOptions, Options
from vlmexport.calibration.objectives.vispec_options import VispecOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training.run import Schedule, train_draft

from .workshop import Answers, Workshop

LAYERS = ("eagle", "vispec")
"""Kinds of draft that are a layer."""


def train_in_stages(
    options: Options,
    loop: LoopOptions,
    target: Target,
    texts: tuple[RecordSet, RecordSet],
    out: Path,
    cache: Path,
    validations: int = 4,
) -> None:
    """Trains a draft, or goes on with it.

    Args:
        options: of the draft; ViSpec's are those of its second stage. loop: of all stages together.
        texts: to train on, to choose the best by. out: folder of the training; a first stage has one beside it.
        cache: folder of the target's rows. validations: how often a stage chooses its best draft.
    """

    def stage(own: Options, part: LoopOptions, place: Path) -> None:
        often, saved = max(1, part.steps // validations), max(1, part.steps // 8)
        train_draft(target, texts[0], own, part, place, texts[1], cache, Schedule(often, saved))

    if isinstance(options, VispecOptions):
        first = loop.steps // 2
        begun = out.with_name(f"{out.name}-stage-1")
        stage(replace(options, stage=1, multi_token_steps=None), replace(loop, steps=first), begun)
        options = replace(options, stage=2, start_from=str(begun))
        loop = replace(loop, steps=loop.steps - first)
    stage(options, loop, out)


def whole_answers(workshop: Workshop) -> Answers:
    """The texts of a workshop that keeps them."""
    assert workshop.answers is not None, "this workshop keeps rows alone"
    return workshop.answers
