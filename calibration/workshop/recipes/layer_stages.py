"""Trainings of drafts that are a layer: EAGLE's in one stage, ViSpec's in two, of half of the steps each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...training.objectives.eagle_options import EagleOptions
from ...training.objectives.vispec_options import VispecOptions
from ...training.options import LoopOptions, Options
from ...training.run import train_draft
from .workshop import Answers, Workshop

KINDS = ("eagle", "vispec")


def train_layer(
    kind: str, workshop: Workshop, loop: LoopOptions, out: Path, begun: Path, cache: Path, validations: int
) -> None:
    """Trains a layer with the defaults of `vlmexport train`, or goes on with it.

    Args:
        kind: one of `KINDS`. workshop: with whole answers. loop: of all stages together.
        out: folder of the training. begun: that of ViSpec's first stage. cache: folder of the target's rows.
        validations: how often a stage chooses its best draft.
    """
    if kind == "eagle":
        _train(EagleOptions(), workshop, loop, out, cache, validations)
        return
    first = loop.steps // 2
    _train(VispecOptions(stage=1), workshop, replace(loop, steps=first), begun, cache, validations)
    second = VispecOptions(stage=2, start_from=str(begun))
    _train(second, workshop, replace(loop, steps=loop.steps - first), out, cache, validations)


def _train(
    options: Options, workshop: Workshop, loop: LoopOptions, out: Path, cache: Path, validations: int
) -> None:
    answers = whole_answers(workshop)
    train_draft(
        workshop.target,
        answers.train,
        options,
        loop,
        out,
        answers.validation,
        cache,
        eval_every=max(1, loop.steps // validations),
        save_every=max(1, loop.steps // 8),
    )


def whole_answers(workshop: Workshop) -> Answers:
    """The texts of a workshop that keeps them."""
    assert workshop.answers is not None, "this workshop keeps rows alone"
    return workshop.answers
