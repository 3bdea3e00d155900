"""EAGLE-3 in training: the layer learns what to say after every step that it will take by itself, from tokens alone.

(Li et al., arXiv 2503.01840, section 3.1: no loss between features; step j reads what step j − 1 gave, sees the target's hidden states up
to its place and its own behind it, and counts 0.8^j. Σ_j 0.8^j of the cross entropy with the target's distribution, over the
draft's tokens where it has some only; places whose likeliest token is not among these are left out.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...exporter.drafts.eagle.eagle3 import Eagle3Draft
from ...exporter.drafts.eagle.eagle3_network import Eagle3Config, Eagle3Network
from ..features.full_sequences import unrolled_over_texts
from ..features.vispec_masks import shifted
from ..targets.target import Texts
from . import losses
from .base import Counts, LearnedTarget, identity_of
from .eagle3_options import Eagle3Options
from .layer import LayerObjective, layer_config, noisy, placed_by


class Eagle3Objective(LayerObjective):
    """The target is frozen. `counts` is asked for where the layer chooses from frequent tokens only."""

    kind, draft_class = Eagle3Draft.kind, Eagle3Draft
    shown = {"first": "hit1", "tokens": "tokens"}
    network: Eagle3Network

    def __init__(self, options: Eagle3Options, target: LearnedTarget, counts: Counts | None = None) -> None:
        super().__init__()
        self.options: Eagle3Options = options
        self.target = identity_of(target)
        taps = options.taps(target.num_layers)
        config, d2t = layer_config(
            Eagle3Config, options, target, counts, taps=taps, **placed_by(options, target)
        )
        self.network = Eagle3Network(config)
        self.network.start_from(target.lm_head.weight.detach(), d2t)

    def loss(self, batch: Texts, target: LearnedTarget) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        """Parts have, of step 0, the loss (`tokens`), and by step the share `hit1`, `hit2`, … of places whose token is
        right."""
        options, network = self.options, self.network
        features = target.features(batch.hidden)
        given = network.given(features, batch.taps)
        if self.training and options.feature_noise:
            given = noisy(given, options.feature_noise)
        total = features.new_zeros(())
        parts: dict[str, Tensor] = {}
        kept = None if network.config.trimmed is None else network.d2t
        steps = unrolled_over_texts(network, batch, given, 1 + options.own_steps)
        for step, draft_features in enumerate(steps):
            learned = batch.learned & shifted(batch.learned, step)
            expected = shifted(features, step + 1)[learned]
            if not len(expected):
                break
            with torch.no_grad():
                own = target.logits(expected)
                best = own.argmax(-1)
            logits = network.logits(draft_features[learned])
            drafted = logits.argmax(-1) if kept is None else kept[logits.argmax(-1)]
            known = torch.ones_like(best, dtype=torch.bool) if kept is None else torch.isin(best, kept)
            if known.any():
                surprise = losses.soft_cross_entropy(logits[known], own[known], kept)
                total = total + options.own_decay**step * surprise
                if step == 0:
                    parts["tokens"] = surprise
            parts[f"hit{step + 1}"] = (drafted == best).float().mean()
        parts["loss"] = total
        return total, {name: value.detach() for name, value in parts.items()}
