"""The trainings of `papers_medusa_captioning.py`: Medusa-1 and Medusa-2 heads of one captioner on the same answers.

Answers, cached rows, trainings and bundles lie in one folder, and what is there is kept: the same call continues a killed
one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from own_answers import own_answers
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.targets.target import load_target
from vlmexport.calibration.training.objectives.medusa_options import MedusaOptions
from vlmexport.calibration.training.options import LoopOptions
from vlmexport.calibration.training.run import train_draft
from vlmexport.calibration.workshop.recipes.common.captioner import LONGEST
from vlmexport.calibration.workshop.recipes.tiny_drafts import TOLD
from vlmexport.exporter.build import BuildRequest, build_bundle
from vlmexport.exporter.drafts.files import MODEL

TARGET = "tiny-vit-gpt2"


RATE = 2e-3
"""Highest learning rate of the heads; the target of Medusa-2 has a quarter, as in the published recipe of joint training."""


@dataclass(frozen=True)
class Kind:
    """How heads are trained: with the target (Medusa-2) or on a frozen one, and `factor` times as many steps."""

    name: str
    joint: bool = False
    factor: int = 1


KINDS = {
    "medusa-1": Kind("Medusa-1"),
    "medusa-1-long": Kind("Medusa-1, ten times the steps", factor=10),
    "medusa-2": Kind("Medusa-2", joint=True),
}


@dataclass(frozen=True)
class Run:
    """One training: one of `KINDS`, how many heads, and the seed."""

    kind: str
    heads: int
    seed: int

    @property
    def name(self) -> str:
        """Of its folders."""
        return f"{self.kind}-{self.heads}-heads-seed-{self.seed}"

    @property
    def joint(self) -> bool:
        """Whether the target learns with the heads."""
        return KINDS[self.kind].joint


def all_runs(kinds: Iterable[str], heads: Iterable[int], seeds: Iterable[int]) -> list[Run]:
    """Every kind with every number of heads and every seed; a seed is done before the next begins."""
    return [Run(kind, count, seed) for seed, count, kind in itertools.product(seeds, heads, kinds)]


def answers(folder: Path, captions: int, validation: int, threads: int) -> list[RecordSet]:
    """The target's own greedy captions of scenes that it has not learned from: [to train on, to choose the best by]."""
    sets = {
        "train": f"scenes-captions:train:{captions}:offset={TOLD}",
        "validation": f"scenes-captions:validation:{validation}",
    }
    return own_answers(TARGET, sets, folder / "answers", LONGEST, threads)


def train(run: Run, folder: Path, told: list[RecordSet], steps: int, batch: int) -> Path:
    """Trains heads with a projection of their `own`, or continues; returns the training's folder.

    All kinds get the same records in the same order, at the same rates. The rows of the frozen target are computed once
    for all runs of Medusa-1.
    """
    steps *= KINDS[run.kind].factor
    out = folder / "trained" / run.name
    train_draft(
        load_target(TARGET, "cpu"),
        told[0],
        MedusaOptions(heads=run.heads, head="own", joint=run.joint),
        LoopOptions(steps, batch, RATE, seed=run.seed),
        out,
        told[1],
        cache=None if run.joint else folder / "features",
        eval_every=max(1, steps // 4),
        save_every=max(1, steps // 8),
    )
    return out


def model_of(run: Run, folder: Path) -> str:
    """The target that the heads of a finished training fit."""
    return str(folder / "trained" / run.name / "best" / MODEL) if run.joint else TARGET


def bundle(run: Run, folder: Path) -> Path:
    """The bundle of a finished training's heads with their target, built if it is not there."""
    path = folder / "bundles" / run.name
    if not (path / "manifest.json").exists():
        heads = str(folder / "trained" / run.name)
        build_bundle(BuildRequest(model=model_of(run, folder), output=path, drafts=[heads]))
    return path
