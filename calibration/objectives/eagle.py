"""EAGLE in training: a layer learns to go on from the target's feature and the token that follows.

(Li et al., arXiv 2401.15077, section 3.2: smooth L1 between features plus 0.1 times the cross entropy between the
distributions that they mean, with uniform noise on the features that it is given.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...exporter.drafts.eagle.eagle import EagleDraft
from ...exporter.drafts.eagle.eagle_network import EagleConfig, EagleNetwork
from ..features.full_sequences import unrolled_over_texts
from ..features.vispec_masks import shifted
from ..targets.target import Texts
from . import losses
from .base import Counts, LearnedTarget, identity_of
from .eagle_options import EagleOptions
from .layer import LayerObjective, layer_config, noisy, placed_by


class EagleObjective(LayerObjective):
    """The target is frozen. `counts` is asked for where the layer chooses from frequent tokens only."""

    kind, draft_class = EagleDraft.kind, EagleDraft
    shown = {"first": "hit1", "features": "features"}
    network: EagleNetwork

    def __init__(self, options: EagleOptions, target: LearnedTarget, counts: Counts | None = None) -> None:
        super().__init__()
        self.options: EagleOptions = options
        self.target = identity_of(target)
        config, d2t = layer_config(
            EagleConfig, options, target, counts, fc_bias=options.fusion_bias, **placed_by(options, target)
        )
        self.network = EagleNetwork(config)
        self.network.start_from(target.lm_head.weight.detach(), d2t)

    def loss(self, batch: Texts, target: LearnedTarget) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        """Σ_j decay^j of the weighted losses after step j; step 0 is the published one.

        Parts have, of step 0, both losses (`features`, `tokens`), and by step the share `hit1`, `hit2`, … of places whose
        token is right.
        """
        options = self.options
        features = target.features(batch.hidden)
        given = features
        if self.training and options.feature_noise:
            given = noisy(features, options.feature_noise)
        total = features.new_zeros(())
        parts: dict[str, Tensor] = {}
        steps = unrolled_over_texts(self.network, batch, given, 1 + options.own_steps)
        for step, draft_features in enumerate(steps):
            learned = batch.learned & shifted(batch.learned, step)
            expected = shifted(features, step + 1)[learned]
            logits = self.network.logits(draft_features[learned], target.lm_head.weight)
            with torch.no_grad():
                own = target.logits(expected)
            if not len(expected):
                break
            kept = None if self.network.config.trimmed is None else self.network.d2t
            distance = losses.smooth_l1(draft_features[learned], expected)
            surprise = losses.soft_cross_entropy(logits, own, kept)
            if step == 0:
                parts |= {"features": distance, "tokens": surprise}
            weighted = options.feature_weight * distance + options.token_weight * surprise
            total = total + options.own_decay**step * weighted
            best = logits.argmax(-1) if kept is None else kept[logits.argmax(-1)]
            parts[f"hit{step + 1}"] = (best == own.argmax(-1)).float().mean()
        parts["loss"] = total
        return total, {name: value.detach() for name, value in parts.items()}
