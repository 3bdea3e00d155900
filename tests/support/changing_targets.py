"""Checkpoints that trainings change, and what is compared before and after."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.features.features import LiveFeatures
from vlmexport.calibration.objectives import objective_for
from vlmexport.calibration.objectives.training_options import LoopOptions, Options
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.calibration.training.trainer import Trainer

from tests.support import tiny_models
from tests.support.training_targets import KINDS, make_records

NEW = 10


@dataclass
class Place:
    """A checkpoint and data for it; every training loads a target of its own, for it changes it."""

    kind: str
    folder: Path
    records: RecordSet

    def target(self) -> Target:
        return load_target(self.folder)


def make_place(kind: str, folder: Path) -> Place:
    name = kind.removesuffix("-tied")
    tiny_models.checkpoint(kind, folder / "model", seed=1, **KINDS[name])
    return Place(kind, folder / "model", make_records(folder, name))


def trainer(
    place: Place, out: Path, own: Options, loop: LoopOptions, target: Target | None = None, **often: Any
) -> Trainer:
    target = target or place.target()
    source = LiveFeatures(target, place.records, own.feature_layer(target), first=True)
    return Trainer(
        partial(objective_for, own), loop, target, source, source, "data", out, report=lambda line: None, **often
    )  # fmt: skip


def learned(target: Target) -> dict[str, bool]:
    """Parameter → whether it is the decoder's, or tied to its head."""
    head = target.lm_head.weight
    inside = {id(p) for m in (target.layers, target.final_norm) for p in m.parameters()} | {id(head)}
    return {n: id(p) in inside for n, p in target.model.named_parameters()}


def weights(target: Target) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in target.model.named_parameters()}
