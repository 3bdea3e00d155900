"""EAGLE in training: a layer learns to go on from the target's feature and the token that follows.

(Li et al., arXiv 2401.15077, section 3.2: smooth L1 between features plus 0.1 times the cross entropy between the
distributions that they mean, with uniform noise on the features that it is given.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....exporter.drafts.eagle import EagleDraft
from ....exporter.drafts.eagle_network import EagleConfig, EagleNetwork
from ....runtime.errors import OptionError
from ...targets.target import Texts
from .. import losses
from ..sight import shifted
from ..texts import unrolled
from .base import Counts, LearnedTarget, Objective, identity_of
from .eagle_options import EagleOptions
from .layer_options import LayerOptions
from .medusa import frequent

PUBLISHED_LENGTH = 512
"""The published code divides its noise by a text's positions and multiplies it by so many."""


class EagleObjective(Objective):
    """The target is frozen. `counts` is asked for where the layer chooses from frequent tokens only."""

    kind = EagleDraft.kind
    shown = {"first": "hit1", "features": "features"}
    network: EagleNetwork

    def __init__(self, options: EagleOptions, target: LearnedTarget, counts: Counts | None = None) -> None:
        super().__init__()
        self.options: EagleOptions = options
        self.target = identity_of(target)
        config, d2t = layer_config(options, target, counts)
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
        steps = unrolled(self.network, batch.embedded, given, 1 + options.own_steps)
        for step, rows in enumerate(steps):
            learned = batch.learned & shifted(batch.learned, step)
            wanted = shifted(features, step + 1)[learned]
            logits = self.network.logits(rows[learned], target.lm_head.weight)
            with torch.no_grad():
                own = target.lm_head(wanted)
            if not len(wanted):
                break
            kept = None if self.network.config.trimmed is None else self.network.d2t
            distance = losses.smooth_l1(rows[learned], wanted)
            surprise = losses.soft_cross_entropy(logits, own, kept)
            if step == 0:
                parts |= {"features": distance, "tokens": surprise}
            weighted = options.feature_weight * distance + options.token_weight * surprise
            total = total + options.own_decay**step * weighted
            best = logits.argmax(-1) if kept is None else kept[logits.argmax(-1)]
            parts[f"hit{step + 1}"] = (best == own.argmax(-1)).float().mean()
        parts["loss"] = total
        return total, {name: value.detach() for name, value in parts.items()}

    def score(self, means: Mapping[str, float]) -> float:
        """How often the first drafted token is the target's."""
        return means["hit1"]

    def learning_rate(self, hidden_size: int) -> float:
        """Of a small layer more than the published 3e-5, which is for 4,096 units and hundreds of thousands of steps:
        in inverse proportion to the width, between 3e-5 and 1e-3."""
        return min(1e-3, max(3e-5, 1e-3 * 128 / hidden_size))

    def draft(self, provenance: Mapping[str, Any], evaluation: Mapping[str, Any]) -> EagleDraft:
        return EagleDraft(
            network=self.network,
            target=self.target,
            provenance=dict(provenance),
            evaluation=dict(evaluation),
        )


def layer_config(
    options: LayerOptions, target: LearnedTarget, counts: Counts | None
) -> tuple[EagleConfig, Tensor | None]:
    """(shape of a layer for `target`, ids of its trimmed vocabulary). OptionError for heads that do not fit."""
    vocabulary, width = target.lm_head.weight.shape
    trimmed, d2t = None, None
    if options.head == "trimmed":
        assert counts is not None, "the layer needs to know which tokens are frequent"
        d2t = frequent(counts(), options.head_vocabulary)
        trimmed = len(d2t)
    shape = target.decoder
    heads = options.attention_heads or shape.num_heads
    if width % heads or width // heads % 2:
        raise OptionError(f"--attention-heads {heads} does not divide the width {width} into pairs")
    config = EagleConfig(
        width,
        vocabulary,
        heads,
        heads if heads % shape.num_kv_heads else shape.num_kv_heads,
        width // heads,
        options.feed_forward or -(-8 * width // 3 // 64) * 64,
        head=options.head,
        trimmed=trimmed,
    )
    return config, d2t


def noisy(features: Tensor, most: float) -> Tensor:
    """`features` [B, T, E] with uniform noise of at most `most` in texts up to the published length, else less."""
    return losses.with_noise(features, 2 * most * min(1.0, PUBLISHED_LENGTH / features.shape[1]))
