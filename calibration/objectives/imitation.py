"""The imitation draft in training: its row should say through the target's head what the target's own last row says.

(FastVLM, arXiv 2510.22641, with the cosine's target corrected; see `fusion`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...exporter.drafts.imitation.imitation import ImitationDraft, ImitationNetwork
from ..features.full_sequences import rows_of
from ..targets.target import FUSED, Rows, Texts
from . import losses
from .base import Counts, LearnedTarget, Objective, identity_of
from .imitation_options import ImitationOptions
from .teacher_fusion import fusion_for


class ImitationObjective(Objective):
    """Losses of a draft's hidden states against a target's."""

    kind = ImitationDraft.kind
    shown = {"Σmin(p,q)": "overlap", "agreement": "agreement"}

    def __init__(
        self, options: ImitationOptions, target: LearnedTarget, counts: Counts | None = None
    ) -> None:
        super().__init__()
        self.options: ImitationOptions = options
        self.target = identity_of(target)
        width = target.hidden_size
        self.network: ImitationNetwork = ImitationNetwork(
            width,
            options.num_linear,
            options.activation,
            options.norm,
            options.residual,
            options.attention_heads,
        )
        self.fusion: nn.Module | None = None
        if options.cosine:
            count = min(FUSED, target.num_layers)
            self.fusion = fusion_for(options.fusion, options.fusion_loss, count, width)

    def loss(self, batch: Rows, target: LearnedTarget) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum; parts also have `overlap` and `agreement`."""
        return self.compare(self.network(batch.trunk), batch, target)

    def compare(
        self, drafted: Tensor, batch: Rows, target: LearnedTarget
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of drafted hidden states [N, E], which enter the target's head."""
        options = self.options
        logits = target.head(drafted)
        with torch.no_grad():
            target_logits = target.head(batch.residuals[:, -1])
        total = drafted.new_zeros(())
        parts: dict[str, Tensor] = {}
        if options.ce:
            parts["ce"] = losses.cross_entropy(logits, batch.tokens)
            total = total + options.ce * parts["ce"]
        if options.kd:
            parts["kd"] = losses.distillation(logits, target_logits, options.kd_distance)
            total = total + options.kd * parts["kd"]
        if options.cosine:
            fused, own = self._fused(batch, target)
            parts["cosine"] = losses.cosine_distance(drafted, fused)
            parts["fused"] = losses.cosine_distance(fused, batch.residuals[:, -1])
            total = total + options.cosine * parts["cosine"] + own
        parts["loss"] = total
        parts["overlap"] = losses.overlap(logits.detach(), target_logits).mean()
        parts["agreement"] = losses.agreement(logits.detach(), target_logits).float().mean()
        return total, {name: value.detach() for name, value in parts.items()}

    def _fused(self, batch: Rows, target: LearnedTarget) -> tuple[Tensor, Tensor]:
        """(what the cosine looks at [N, E], the fusion's own loss). The cosine has no gradient there, unless the fusion is to
        learn from it, and neither has one to the target, also where that learns."""
        assert self.fusion is not None
        fused = self.fusion(batch.residuals.detach())
        if self.options.fusion_loss == "cosine":
            return fused, fused.new_zeros(())
        if not any(p.requires_grad for p in self.fusion.parameters()):
            return fused.detach(), fused.new_zeros(())
        return fused.detach(), losses.cross_entropy(target.head(fused), batch.tokens)

    def score(self, means: Mapping[str, float]) -> float:
        """Greedy acceptance; the overlap decides between equals."""
        return means["agreement"] + 1e-3 * means["overlap"]

    def learning_rate(self, hidden_size: int) -> float:
        """The best of those that were tried at widths 128 and 576 (docs/how-to/training-runs.md)."""
        return 1e-2

    def draft(self, provenance: Mapping[str, Any], evaluation: Mapping[str, Any]) -> ImitationDraft:
        return ImitationDraft(
            network=self.network,
            layer=self.options.layer,
            target=self.target,
            provenance=dict(provenance),
            evaluation=dict(evaluation),
        )


class AttendingObjective(ImitationObjective):
    """The same losses at the same positions for a network with attention, which sees the whole text before each, its prompt too."""

    def loss(self, batch: Texts, target: LearnedTarget) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        """As `ImitationObjective`."""
        layer = self.options.layer
        places, targets = rows_of(batch, layer, self.options.fused(target.num_layers))
        return self.compare(self.network(batch.taps[layer])[places], targets, target)
