"""The trainings of `papers_vispec.py`: drafts of one target on the same answers, in one folder. What is there is kept, so the
same call continues a killed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.objectives import options_of
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.exporter.pipeline import BuildRequest, build_bundle

from benchmarks.own_answers import own_answers
from recipes.layer_stages import train_in_stages
from recipes.tiny_drafts import TOLD

LONGEST = 160
"""Tokens of an answer at most."""


@dataclass(frozen=True)
class Arm:
    """A draft of `kind` that learns from `data`, one of `DATA`."""

    title: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    data: str = "long"


ARMS = {
    "medusa": Arm("Medusa, 4 heads of their own", "medusa", {"heads": 4, "head": "own"}),
    "eagle": Arm("EAGLE-2", "eagle"),
    "vispec": Arm("ViSpec, 1 token", "vispec"),
    "vispec-4": Arm("ViSpec, 4 tokens", "vispec", {"compressed_tokens": 4}),
    "vispec-16": Arm("ViSpec, 16 tokens", "vispec", {"compressed_tokens": 16}),
    "vispec-no-global": Arm("ViSpec without the global feature", "vispec", {"global_feature": False}),
    "vispec-one-reading": Arm("ViSpec without multi-token steps", "vispec", {"multi_token_steps": 0}),
    "vispec-short": Arm("ViSpec, trained on short answers", "vispec", data="short"),
    "eagle-short": Arm("EAGLE-2, trained on short answers", "eagle", data="short"),
}
"""The main comparison is of the first three, on the same answers; the rest are ViSpec's ablations, and EAGLE-2 on the short
answers that ViSpec's authors gave it (68,000 of LLaVA's pre-training, where ViSpec learned from long ones, too)."""

DATA = {
    "long": "scenes:train:{count}:offset={offset}",
    "short": "scenes-questions:train:{count}:offset={offset}",
}
"""Scenes that the bundled models did not learn from: descriptions, and answers to one question."""

VALIDATION = {"long": "scenes:validation:{count}", "short": "scenes-questions:validation:{count}"}


@dataclass(frozen=True)
class Run:
    """One training of an arm."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folders."""
        return f"{self.arm}-seed-{self.seed}"


def all_runs(arms: Iterable[str], seeds: Iterable[int]) -> list[Run]:
    """Every arm with every seed; a seed is done before the next begins."""
    return [Run(arm, seed) for seed, arm in itertools.product(seeds, arms)]


def answers(
    model: str, folder: Path, name: str, count: int, validation: int, threads: int
) -> list[RecordSet]:
    """The target's own greedy answers to data of that name: [to train on, to choose the best by]."""
    sets = {
        f"{name}-train": DATA[name].format(count=count, offset=TOLD),
        f"{name}-validation": VALIDATION[name].format(count=validation),
    }
    return own_answers(model, sets, folder / "answers", LONGEST, threads)


def train(
    run: Run, folder: Path, target: Target, told: list[RecordSet], steps: int, batch: int, rate: float | None
) -> Path:
    """Trains, or continues; returns the draft's folder. Arms get the same records in the same order and the same number of
    steps; the target runs over the records once for all of them.

    Args:
        run: which arm, and its seed. folder: see `papers_vispec.py`. told: to train on, to choose the best by. steps, batch: of
            all stages together. rate: the highest learning rate; None: that which `vlmexport train` gives the arm's kind.
    """
    arm = ARMS[run.arm]
    out = folder / "trained" / run.name
    loop = LoopOptions(steps, batch, rate, seed=run.seed)
    options = options_of(arm.kind).of(arm.options)
    train_in_stages(options, loop, target, (told[0], told[1]), out, folder / "features")
    return out


def bundle(run: Run, folder: Path, model: str) -> Path:
    """The bundle of a finished training's draft with the target, built if it is not there."""
    path = folder / "bundles" / run.name
    if not (path / "manifest.json").exists():
        build_bundle(
            BuildRequest(model=model, output=path, drafts=[str(folder / "trained" / run.name)], parity=False)
        )
    return path
