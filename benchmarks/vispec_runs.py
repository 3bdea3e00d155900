"""The trainings of `papers_vispec.py`: drafts of one target on the same answers, in one folder. What is there is kept, so the
same call continues a killed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from own_answers import own_answers
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training.objectives import options_of
from vlmexport.calibration.training.options import LoopOptions
from vlmexport.calibration.training.run import train_draft
from vlmexport.calibration.workshop.recipes.tiny_drafts import TOLD
from vlmexport.exporter.build import BuildRequest, build_bundle

LONGEST = 160
"""Tokens of an answer at most."""


@dataclass(frozen=True)
class Arm:
    """A draft of `kind` that learns from `data`, one of `DATA`; `staged`: half of the steps are ViSpec's first stage."""

    title: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    data: str = "long"
    staged: bool = False


ARMS = {
    "medusa": Arm("Medusa, 4 heads of their own", "medusa", {"heads": 4, "head": "own"}),
    "eagle": Arm("EAGLE-2", "eagle"),
    "vispec": Arm("ViSpec, 1 token", "vispec", staged=True),
    "vispec-4": Arm("ViSpec, 4 tokens", "vispec", {"compressed_tokens": 4}, staged=True),
    "vispec-16": Arm("ViSpec, 16 tokens", "vispec", {"compressed_tokens": 16}, staged=True),
    "vispec-no-global": Arm(
        "ViSpec without the global feature", "vispec", {"global_feature": False}, staged=True
    ),
    "vispec-one-reading": Arm(
        "ViSpec without multi-token steps", "vispec", {"multi_token_steps": 0}, staged=True
    ),
    "vispec-short": Arm("ViSpec, trained on short answers", "vispec", data="short", staged=True),
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
    given = dict(arm.options)
    if arm.staged:
        first = steps // 2
        begun = folder / "trained" / f"{run.name}-stage-1"
        one = {**given, "stage": 1}
        one.pop("multi_token_steps", None)
        _train(arm.kind, one, run.seed, begun, folder, target, told, first, batch, rate)
        given |= {"stage": 2, "start_from": str(begun)}
        steps -= first
    _train(arm.kind, given, run.seed, out, folder, target, told, steps, batch, rate)
    return out


def _train(
    kind: str,
    given: Mapping[str, Any],
    seed: int,
    out: Path,
    folder: Path,
    target: Target,
    told: list[RecordSet],
    steps: int,
    batch: int,
    rate: float | None,
) -> None:
    train_draft(
        target,
        told[0],
        options_of(kind).of(given),
        LoopOptions(steps, batch, rate, seed=seed),
        out,
        told[1],
        cache=folder / "features",
        eval_every=max(1, steps // 4),
        save_every=max(1, steps // 8),
    )


def bundle(run: Run, folder: Path, model: str) -> Path:
    """The bundle of a finished training's draft with the target, built if it is not there."""
    path = folder / "bundles" / run.name
    if not (path / "manifest.json").exists():
        build_bundle(
            BuildRequest(model=model, output=path, drafts=[str(folder / "trained" / run.name)], parity=False)
        )
    return path
