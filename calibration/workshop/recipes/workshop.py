"""A target with cached rows of its own answers, on which drafts are trained and compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from ....exporter.drafts.base import Draft
from ...evaluation.acceptance import Acceptance, measure
from ...targets.target import Target
from ...training.features import CachedFeatures
from ...training.objectives import objective_for
from ...training.objectives.imitation_options import ImitationOptions
from ...training.options import LoopOptions
from ...training.trainer import Trainer

SHIPPED = {"ce": 1.0, "cosine": 1.0, "kd": 1.0, "kd_distance": "forward"}
DRAFT_LENGTH = 5


@dataclass
class Features:
    """Cached rows of one draft layer."""

    train: CachedFeatures
    validation: CachedFeatures
    heldout: CachedFeatures  # float32, so that argmaxes are the target's own


@dataclass
class Workshop:
    """A target with cached rows of its own answers. `batch`: records per step; `lr`: the learning rate that suits it;
    `heldout_data`: how `--data` names what is held out, where it can."""

    target: Target
    features: dict[int, Features]
    data: str
    batch: int = 64
    lr: float = 1e-3
    heldout_data: str = ""

    def train(self, kind: ImitationOptions, options: LoopOptions, out: Path) -> Draft:
        """Runs, continues or (when complete) rereads one training run."""
        features = self.features[kind.layer]
        return Trainer(
            partial(objective_for, kind),
            options,
            self.target,
            features.train,
            features.validation,
            self.data,
            out,
            eval_every=max(1, options.steps // 4),
            save_every=max(1, options.steps // 4),
            log_every=100,
        ).train()

    def heldout(self, layer: int, network: nn.Module) -> Acceptance:
        """Greedy acceptance on held-out answers; `nn.Identity` is the early exit."""
        return measure(self.features[layer].heldout, network, self.target, DRAFT_LENGTH, self.batch)
