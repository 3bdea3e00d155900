"""A target with cached hidden states of its own answers, on which drafts are trained and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import overload

import torch
from torch import nn
from vlmexport.calibration.data import RecordSet
from vlmexport.calibration.evaluation.acceptance import Acceptance, measure
from vlmexport.calibration.evaluation.draft_measures import MeasuredHeads
from vlmexport.calibration.features.features import CachedFeatures, build_cache, in_batches
from vlmexport.calibration.objectives import objective_for
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.medusa_options import MedusaOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target
from vlmexport.calibration.training.run import token_counts
from vlmexport.calibration.training.trainer import Trainer
from vlmexport.exporter.drafts.common.base import Draft
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.exporter.drafts.medusa.medusa import MedusaDraft

SHAPE = {"num_linear": 2, "activation": "gelu", "norm": "layer_norm", "residual": True, "attention_heads": 0}
"""Of the imitation networks that docs/results/papers/fastvlm.md compares with each other, and of SmolLM2's. What ships has all defaults of
`vlmexport train`; that a network without a residual learns better was found later."""
COMPARED = {"ce": 1.0, "cosine": 1.0, "kd": 1.0, "kd_distance": "forward", **SHAPE}
DRAFT_LENGTH = 5


@dataclass
class Features:
    """Cached hidden states of one draft layer. Those that are held out are made when they are first asked for: not everybody measures
    a draft by rows."""

    train: CachedFeatures
    validation: CachedFeatures
    make_heldout: Callable[[], CachedFeatures]

    @cached_property
    def heldout(self) -> CachedFeatures:
        """Of held-out answers, float32, so that argmaxes are the target's own."""
        return self.make_heldout()


def cached_features(
    target: Target,
    train: RecordSet,
    validation: RecordSet,
    heldout: RecordSet,
    layers: Sequence[int],
    folder: Path,
) -> dict[int, Features]:
    """Rows after `layers`, by layer, of records with tokens: float16 to train on. What is in `folder` already is kept."""

    def store(records: RecordSet, dtype: str) -> Path:
        return build_cache(target, records, layers, folder, dtype)

    learned, checked = store(train, "float16"), store(validation, "float16")
    measured = cache(partial(store, heldout, "float32"))  # once, for all layers

    def at(layer: int) -> Features:
        def opened(place: Path) -> CachedFeatures:
            return CachedFeatures(place, layer, target.device)

        return Features(opened(learned), opened(checked), lambda: opened(measured()))

    return {layer: at(layer) for layer in layers}


@dataclass(frozen=True)
class Answers:
    """A target's own answers, whole texts; `captions` are those of `train` that describe a scene, `heldout` such ones, and
    `forms` all that is held out, by what was asked for."""

    train: RecordSet
    captions: RecordSet
    validation: RecordSet
    heldout: RecordSet
    forms: Mapping[str, RecordSet]


@dataclass
class Workshop:
    """A target with cached hidden states of its own answers. `batch`: records per step; `lr`: the learning rate that suits it;
    `answers`: what the rows are of, for drafts that learn
    from whole texts."""

    target: Target
    features: dict[int, Features]
    data: str
    batch: int = 64
    lr: float = 1e-3
    answers: Answers | None = None

    @overload
    def train(self, kind: ImitationOptions, options: LoopOptions, out: Path) -> ImitationDraft: ...

    @overload
    def train(self, kind: MedusaOptions, options: LoopOptions, out: Path) -> MedusaDraft: ...

    def train(self, kind: ImitationOptions | MedusaOptions, options: LoopOptions, out: Path) -> Draft:
        """Runs, continues or (when complete) rereads one training run. Heads read the target's last hidden states, which are
        beside those of every draft layer."""
        features = self._features(kind.layer if isinstance(kind, ImitationOptions) else None)
        return Trainer(
            partial(
                objective_for,
                kind,
                counts=lambda: token_counts([features.train.tokens], self.target.vocabulary),
            ),
            options,
            self.target,
            features.train,
            features.validation,
            self.data,
            out,
            eval_every=max(1, options.steps // 4),
            save_every=max(1, options.steps // 4),
            log_every=100,
            device=self.target.device,
        ).train()

    def heldout(self, layer: int, network: nn.Module) -> Acceptance:
        """Greedy acceptance on held-out answers; `nn.Identity` is the early exit."""
        network = network.to(self.target.device)
        return measure(self.features[layer].heldout, network, self.target, DRAFT_LENGTH, self.batch)

    def heldout_heads(self, draft: MedusaDraft) -> Acceptance:
        """Acceptance of chains of Medusa heads on held-out answers."""
        measured = MeasuredHeads(self.target, draft, draft.network.config.heads)
        with torch.no_grad():
            for batch in in_batches(self._features(None).heldout, self.batch):
                last = batch.residuals[:, -1]
                measured.add(last, self.target.head(last), batch)
        return measured.result()

    def _features(self, layer: int | None) -> Features:
        return self.features[min(self.features) if layer is None else layer]
