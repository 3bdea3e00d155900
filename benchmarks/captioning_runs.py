"""The trainings of `papers_medusa_captioning.py`: Medusa-1 and Medusa-2 heads of one captioner on the same answers.

Answers, cached rows, trainings and bundles lie in one folder, and what is there is kept: the same call continues a killed
one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.objectives.medusa_options import MedusaOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import load_target
from vlmexport.calibration.training.run import Schedule, train_draft
from vlmexport.exporter.drafts.common.files import MODEL
from vlmexport.exporter.pipeline import BuildRequest, build_bundle

from benchmarks.own_answers import own_answers
from recipes.common.captioner import LONGEST
from recipes.tiny_drafts import TOLD

TARGET = "tiny-vit-gpt2"


@dataclass(frozen=True)
class Rates:
    """Highest learning rates, of the heads and of a target that learns with them."""

    heads: float
    target: float | None = None

    def __str__(self) -> str:
        return f"{self.heads:g}" + ("" if self.target is None else f"-{self.target:g}")


@dataclass(frozen=True)
class Kind:
    """How heads are trained: on a frozen target, or with it (Medusa-2), at which rates, and `factor` times as many steps."""

    name: str
    rates: Rates
    factor: int = 1


KINDS = {
    "medusa-1": Kind("Medusa-1", Rates(3e-2)),
    "medusa-1-long": Kind("Medusa-1, ten times the steps", Rates(3e-2), factor=10),
    "medusa-2": Kind("Medusa-2", Rates(3e-2, 5e-4)),
}
"""Heads learn at the rate that was the best of `SWEPT` on validation scenes; that of the target is a trade (docs/results/papers/medusa-captioning.md)."""
SWEPT = {
    "medusa-1": [Rates(rate) for rate in (2e-3, 7e-3, 2e-2, 3e-2, 6e-2)],
    "medusa-2": [Rates(*rates) for rates in itertools.product((2e-3, 1e-2, 3e-2), (2e-4, 5e-4, 2e-3))],
}


@dataclass(frozen=True)
class Run:
    """One training: one of `KINDS`, how many heads, the seed, and at which rates."""

    kind: str
    heads: int
    seed: int
    rates: Rates

    @property
    def name(self) -> str:
        """Of its folders."""
        return f"{self.kind}-{self.heads}-heads-{self.rates}-seed-{self.seed}"

    @property
    def joint(self) -> bool:
        """Whether the target learns with the heads."""
        return self.rates.target is not None

    def described(self) -> dict[str, Any]:
        """What it is, for a file of results."""
        kind, rates = KINDS[self.kind].name, self.rates
        return {"kind": kind, "heads": self.heads, "rate": rates.heads, "base_rate": rates.target}


def all_runs(kinds: Iterable[str], heads: Iterable[int], seeds: Iterable[int]) -> list[Run]:
    """Every kind with every number of heads and every seed, at the kind's rates; a seed is done before the next begins."""
    every = itertools.product(seeds, heads, kinds)
    return [Run(kind, count, seed, KINDS[kind].rates) for seed, count, kind in every]


def answers(folder: Path, captions: int, validation: int, threads: int) -> list[RecordSet]:
    """The target's own greedy captions of scenes that it has not learned from: [to train on, to choose the best by]."""
    sets = {
        "train": f"scenes-captions:train:{captions}:offset={TOLD}",
        "validation": f"scenes-captions:validation:{validation}",
    }
    return own_answers(TARGET, sets, folder / "answers", LONGEST, threads)


def train(run: Run, folder: Path, told: list[RecordSet], steps: int, batch: int) -> Path:
    """Trains heads with a projection of their `own`, or continues; returns the training's folder.

    All kinds get the same records in the same order. The rows of the frozen target are computed once for all runs of
    Medusa-1. Raises DivergedError for rates that are too high.
    """
    steps *= KINDS[run.kind].factor
    out = folder / "trained" / run.name
    train_draft(
        load_target(TARGET, "cpu"),
        told[0],
        MedusaOptions(heads=run.heads, head="own", joint=run.joint, base_lr=run.rates.target),
        LoopOptions(steps, batch, run.rates.heads, seed=run.seed),
        out,
        told[1],
        cache=None if run.joint else folder / "features",
        schedule=Schedule(max(1, steps // 4), max(1, steps // 8)),
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
